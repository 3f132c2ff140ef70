"""Packing that computes a shared prompt once for all of its responses; gradients equal those of separate rows.

separate  p p p a a a | p p p b b | p p p c c c c
shared    p p p a a a b b c c c c                      a, b and c each see p and themselves, not each other

Prompt tokens have the same activations in each row, so their keys and values serve all responses, and their gradients are summed.
The first token of every response is predicted from the prompt's last position.

Shapes: N tokens packed, P of a prompt, R of its responses, H query heads, K key/value heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from braidrl.data.packing import plan_micro_batches
from braidrl.data.rows import Rows
from braidrl.training.compute.attention import Forward, Scores, attend_equal, capped, softmax
from braidrl.training.compute.packed import Packed, pack

LEAST_SAVED = 0.25
"""Least share of tokens that sharing must save; below it, masked attention costs more than it saves."""


@dataclass(frozen=True)
class Family:
    """Rows that share a prompt: its tokens, the tokens of each response, and each response's row number."""

    prompt: int
    responses: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """The attention context of consecutively packed families."""

    families: tuple[Family, ...]
    device: torch.device

    def mix(self, module: nn.Module, forward: Forward, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Raise ValueError: models with mixers cannot share prompts."""
        raise ValueError(f"{type(module).__name__} cannot continue a prompt's state in several responses")

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend with queries (1, H, N, D) to keys and values (1, K, N, D); returns (1, N, H, D). Raises ValueError for another N."""
        sizes = [size for family in self.families for size in (family.prompt, *_blocks(family))]
        if query.shape[0] != 1 or query.shape[2] != sum(sizes):
            raise ValueError(f"families of {sum(sizes)} tokens, but the input is {tuple(query.shape)}")
        # split, not slices: the backward of a split is one concatenation
        queries, keys, values = (states[0].transpose(0, 1).split(sizes) for states in (query, key, value))
        outputs, place = [], 0
        for number, family in enumerate(self.families):
            prompt = place
            outputs.append(attend_equal(queries[prompt][None], keys[prompt][None], values[prompt][None], scores, True))
            for block in range(len(_blocks(family))):
                place += 1
                seen_keys = torch.cat([keys[prompt], keys[place]])
                seen_values = torch.cat([values[prompt], values[place]])
                mask = self._mask(number, block, scores)
                outputs.append(_masked(queries[place], seen_keys, seen_values, mask, scores))
            place += 1
        return torch.cat(outputs)[None]

    @cached_property
    def _masks(self) -> dict[tuple[int, int, int | None, int | None], Tensor]:
        return {}

    def _mask(self, family: int, block: int, scores: Scores) -> Tensor:
        """Return a bool mask: whether each response token of the block (rows) sees each key of prompt and block (columns)."""
        key = family, block, scores.window, scores.chunk
        known = self._masks.get(key)
        if known is None:
            prompt, lengths = self.families[family].prompt, _responses_by_block(self.families[family])[block]
            known = self._masks[key] = visible(prompt, lengths, scores).to(self.device)
        return known


def visible(prompt: int, responses: Sequence[int], scores: Scores) -> Tensor:
    """Return the (R, P + R) bool mask: a token sees the prompt and earlier tokens of its response, within window and chunk."""
    own = torch.cat([torch.full((n,), i) for i, n in enumerate(responses)])
    place = torch.cat([torch.arange(n) for n in responses]) + prompt
    of_key = torch.cat([torch.full((prompt,), -1), own])
    key_place = torch.cat([torch.arange(prompt), place])
    return ((of_key == -1) | (of_key == own[:, None])) & scores.visible(place[:, None], key_place[None, :])


def _responses_by_block(family: Family) -> list[list[int]]:
    """Group responses into attention calls of at most the prompt's length, so that masked scores cost no more than the prompt."""
    blocks: list[list[int]] = []
    for length in family.responses:
        if blocks and sum(blocks[-1]) + length <= family.prompt:
            blocks[-1].append(length)
        else:
            blocks.append([length])
    return blocks


def _blocks(family: Family) -> list[int]:
    return [sum(block) for block in _responses_by_block(family)]


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """Attend with (R, H, D) queries to (P + R, K, D) keys and values under a mask; returns (R, H, D)."""
    if scores.softcap is not None or scores.sinks is not None:
        # Plain operations, in at least float32.
        dtype = torch.promote_types(query.dtype, torch.float32)
        queries = query.unflatten(1, (key.shape[1], -1)).permute(1, 2, 0, 3).to(dtype)
        keys, values = (states.transpose(0, 1)[:, None].to(dtype) for states in (key, value))
        products = capped(torch.matmul(queries * scores.scaling, keys.transpose(-1, -2)), scores)
        products = products.masked_fill(~mask, float("-inf"))
        sinks = scores.sinks
        if sinks is not None:
            sinks = sinks.view(key.shape[1], -1, 1, 1).expand(-1, -1, len(query), 1)
        return torch.matmul(softmax(products, sinks), values).permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)
    output = scaled_dot_product_attention(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None],
        attn_mask=mask, scale=scores.scaling, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output[0].transpose(0, 1)


def families_of(rows: Rows) -> list[Family] | None:
    """Group rows by group and tokens before the first action; return None if a row has several sequences or no action."""
    lengths = rows["tokens"].lengths
    if not torch.equal(rows["sequence_lengths"].values, lengths):
        return None
    offsets, actions = rows["action_mask"].offsets.tolist(), rows["action_mask"].values
    found: dict[tuple[int, bytes], list[tuple[int, int, int]]] = {}
    tokens, groups = rows["tokens"].values, rows["group"].tolist()
    for row, (start, end) in enumerate(pairwise(offsets)):
        sampled = actions[start:end].nonzero()
        first = int(sampled[0]) if len(sampled) else 0
        if first == 0:
            return None
        name = (groups[row], tokens[start : start + first].numpy().tobytes())
        found.setdefault(name, []).append((row, first, end - start - first))
    return [
        Family(members[0][1], tuple(m[2] for m in members), tuple(m[0] for m in members)) for members in found.values()
    ]


def saves_enough(rows: Rows) -> bool:
    """Return whether sharing prompts saves at least LEAST_SAVED of the tokens."""
    if not len(rows):
        return False
    families = families_of(rows)
    total = len(rows["tokens"].values)
    return families is not None and total - sum(family.tokens for family in families) >= LEAST_SAVED * total


def plan_shared(rows: Rows, max_tokens: int) -> list[list[int]]:
    """Return the row numbers of each micro-batch, counting shared prompts once; split families over the limit.

    Raises UserError for a row over the limit.
    """
    parts: list[Family] = []
    for family in families_of(rows) or []:
        start, held = 0, family.prompt
        for i, length in enumerate(family.responses):
            if i > start and held + length > max_tokens:
                parts.append(Family(family.prompt, family.responses[start:i], family.rows[start:i]))
                start, held = i, family.prompt
            held += length
        parts.append(Family(family.prompt, family.responses[start:], family.rows[start:]))
    uids = rows.uids()
    (plan,) = plan_micro_batches(
        [part.tokens for part in parts], 1, max_tokens, uids=[uids[part.rows[0]] for part in parts]
    )
    return [sorted(row for number in batch for row in parts[number].rows) for batch in plan if batch]


@dataclass(frozen=True)
class PackedFamilies(Packed):
    """Rows packed with each prompt once; `sequence_lengths` are the lengths of the separate rows."""

    families: tuple[Family, ...]

    def attention(self) -> SharedPrompts:
        return SharedPrompts(self.families, self.input_ids.device)

    def _followed_by(self, lengths: tuple[int, ...]) -> dict[str, Any]:
        return {"families": (*self.families, *(Family(length, (), ()) for length in lengths))}


def pack_shared(rows: Rows, device: torch.device) -> PackedFamilies:
    """Pack rows with each family's prompt once. Raises ValueError for rows without families."""
    families = families_of(rows)
    if families is None:
        raise ValueError("rows of several sequences, or without actions, share no prompts")
    packed = pack(rows, torch.device("cpu"))
    # The position of each token in the shared packing, (N,), and the packing's number of tokens.
    place, total = torch.empty(len(packed.input_ids), dtype=torch.int64), 0
    offsets = rows["tokens"].offsets.tolist()
    for family in families:
        end = total + family.prompt
        for row, length in zip(family.rows, family.responses, strict=True):
            start = offsets[row]
            place[start : start + family.prompt] = torch.arange(total, total + family.prompt)
            place[start + family.prompt : start + family.prompt + length] = torch.arange(end, end + length)
            end += length
        total = end

    def moved(values: Tensor) -> Tensor:
        result = values.new_empty(total)
        result[place] = values
        return result.to(device)

    return PackedFamilies(
        moved(packed.input_ids), moved(packed.position_ids), packed.sequence_lengths,
        place[packed.predictors].to(device), packed.targets.to(device), packed.offsets,
        place[packed.row_ends].to(device), tuple(families),
    )  # fmt: skip
