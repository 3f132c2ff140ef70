"""Rows packed end to end for one forward pass, without padding; attention stays within each sequence.

tokens      p p p a a | p p a a a | p a          concatenated rows, or sequences of a row
actions           ^ ^       ^ ^ ^     ^          sampled tokens; each is predicted from the position before it

A shared prompt can be computed once for all of its responses; gradients equal those of separate rows.

separate  p p p a a a | p p p b b | p p p c c c c
shared    p p p a a a b b c c c c                      a, b and c each see p and themselves, not each other

Prompt tokens have the same activations in each row, so that all responses use their keys and values, and their
gradients are summed. The first token of every response is predicted from the prompt's last position.

Shapes: N tokens packed, P of a prompt, R of its responses, H query heads, K key/value heads, D head width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn

from braidrl.algorithms.ragged import offsets_of
from braidrl.data.packing import Preferred, plan_micro_batches
from braidrl.data.rows import Rows
from braidrl.data.token_columns import of_all_tokens
from braidrl.data.vision import IMAGE_TOKENS
from braidrl.native.kernels import LONGEST
from braidrl.training.compute.attention import (
    AttentionContext,
    Forward,
    PackedSequences,
    Scores,
    additive,
    attend_compiled,
    attend_equal,
    attend_plainly,
)
from braidrl.training.compute.rope_lengths import SAME, RopeLengths

Predict = Callable[..., dict[str, Tensor]]
"""Computes the predictions of a packed micro-batch by name."""
PlaceImages = Callable[["Packed", Rows], "Packed"]
"""Gives a packing of rows, in their order, the positions and inputs of their images."""
OnPrediction = Callable[[int, dict[str, Tensor]], Tensor | None]
"""Called with a micro-batch's number and predictions; returns the loss for the backward pass, or None."""
BLOCKS = "image_blocks"
"""Name of the numbers (N,) of images whose tokens see each other, 0 for text; of models in which they do."""
HIDDEN = "hidden"
"""Name of the hidden states in the predictions of all pipeline ranks but the last."""
HAS_ENTRIES = "has_entries"
"""Name of the mask (N,) of tokens with entries in the columns of all tokens."""
FILLER = 64
"""Length of padding sequences; attention over many short sequences costs less than over a long one."""
LEAST_SAVED = 0.25
"""Least share of tokens that sharing prompts must save; below it, masked attention costs more than it saves."""
LEAST_SAVED_COMPILED = 0.05
"""The same where attention is the compiled kernel, which needs no mask."""


@dataclass(frozen=True)
class Family:
    """Rows that share a prompt: its tokens, the tokens of each response, and each response's row number."""

    prompt: int
    responses: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)

    @cached_property
    def blocks(self) -> list[list[int]]:
        """Group responses into attention calls of at most the prompt's length, so that masked scores cost no more than
        the prompt.
        """
        blocks: list[list[int]] = []
        for length in self.responses:
            if blocks and sum(blocks[-1]) + length <= self.prompt:
                blocks[-1].append(length)
            else:
                blocks.append([length])
        return blocks


@dataclass(frozen=True)
class Packed:
    """N tokens of B rows with A action tokens, packed without padding.

    per_token: tensors (N, ...) by name, `input_ids` and `position_ids` first
    sequence_lengths: of all sequences, also where they share prompts
    predictors (A,): positions whose hidden states predict the actions
    targets (A,): the actions
    offsets (B + 1,), on the CPU: each row's slice of the A actions
    row_ends (B,): position of each row's last token
    hidden (1, N, D): the previous pipeline rank's output; None on the first
    families: the rows that share prompts; None if each row has its own
    model_inputs: further inputs of the model by name, which are not per token (names of images)
    context: the attention context where these are one rank's tokens of the sequences
    """

    per_token: Mapping[str, Tensor]
    sequence_lengths: tuple[int, ...]
    predictors: Tensor
    targets: Tensor
    offsets: Tensor
    row_ends: Tensor
    hidden: Tensor | None = field(default=None, kw_only=True)
    families: tuple[Family, ...] | None = field(default=None, kw_only=True)
    context: AttentionContext | None = field(default=None, kw_only=True)
    model_inputs: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def input_ids(self) -> Tensor:
        return self.per_token["input_ids"]

    @property
    def position_ids(self) -> Tensor:
        """Return positions (N,), or (N, axes) of a rope with several axes."""
        return self.per_token["position_ids"]

    @property
    def rope_positions(self) -> Tensor:
        """Return positions as models take them: (1, N), or (axes, 1, N)."""
        positions = self.position_ids
        return positions[None] if positions.dim() == 1 else positions.T[:, None]

    def select(self, positions: Tensor, new_positions: Tensor | None = None) -> Self:
        """Return the tokens at `positions` (M,), where -1 makes a filler token of zeros.

        Predictors, their targets and row ends move with their tokens; those of dropped tokens are dropped.
        `new_positions` (N,) are the new positions of all tokens, -1 for dropped ones; by default each token is selected
        once.
        """
        is_filler = positions < 0
        if new_positions is None:
            new_positions = torch.full_like(self.input_ids, -1)
            new_positions[positions[~is_filler]] = torch.arange(len(positions), device=positions.device)[~is_filler]
        predictors, row_ends = new_positions[self.predictors], new_positions[self.row_ends]
        return replace(
            self,
            per_token={
                name: values[positions].masked_fill(is_filler.view(-1, *[1] * (values.dim() - 1)), 0)
                for name, values in self.per_token.items()
            },
            predictors=predictors[predictors >= 0],
            targets=self.targets[predictors >= 0],
            row_ends=row_ends[row_ends >= 0],
        )

    def to(self, device: torch.device) -> Self:
        """Return the same packing with tensors on a device; `offsets` stay on the CPU."""
        return replace(
            self,
            per_token={name: values.to(device) for name, values in self.per_token.items()},
            predictors=self.predictors.to(device),
            targets=self.targets.to(device),
            row_ends=self.row_ends.to(device),
        )

    def attention(self) -> AttentionContext:
        if self.context is not None:
            return self.context
        if self.families is not None:
            return SharedPrompts(self.families, self.input_ids.device)
        blocks = self.per_token.get(BLOCKS)
        return PackedSequences.of(self.sequence_lengths, self.input_ids.device, keep_scores=True, blocks=blocks)

    def padded(self, tokens: int) -> Self:
        """Return the same rows padded to `tokens` tokens by filler sequences."""
        missing = tokens - len(self.input_ids)
        if not missing:
            return self
        device, count = self.input_ids.device, len(self.input_ids)
        lengths = tuple(min(FILLER, missing - start) for start in range(0, missing, FILLER))
        families = None if self.families is None else (*self.families, *(Family(length, (), ()) for length in lengths))
        new_positions = torch.arange(count, device=device)
        filled = self.select(torch.cat([new_positions, new_positions.new_full((missing,), -1)]), new_positions)
        of_filler = torch.arange(missing, device=device) % FILLER
        filled.position_ids[count:] = of_filler.view(-1, *(1,) * (filled.position_ids.dim() - 1))
        return replace(filled, sequence_lengths=(*self.sequence_lengths, *lengths), families=families)


def pack(
    rows: Rows,
    device: torch.device,
    share_prompts: bool = False,
    rope_lengths: RopeLengths = SAME,
    place_images: PlaceImages | None = None,
) -> Packed:
    """Pack rows for one forward pass, with `share_prompts` each prompt once; `place_images` is called for rows with
    images.

    Raises ValueError if an action begins a sequence.
    """
    tokens, lengths = rows["tokens"], rows["sequence_lengths"].values
    actions = rows["action_mask"].values.nonzero().flatten()
    starts = offsets_of(lengths)
    positions = torch.arange(len(tokens.values)) - starts[:-1].repeat_interleave(lengths)
    if len(actions) and int(positions[actions].min()) == 0:
        raise ValueError("an action token begins a sequence; a prompt must hold at least one token")
    per_row = rows["action_mask"].with_values(rows["action_mask"].values.to(torch.int64)).row_sums()
    per_token = {"input_ids": tokens.values, "position_ids": positions}
    for name in of_all_tokens():
        if (column := rows.get(name)) is not None:
            # The last tokens of a row have no entries.
            values = column.values.new_zeros((len(tokens.values), *column.values.shape[1:]))
            starts = column.spread(tokens.offsets[:-1] - column.offsets[:-1])
            values[torch.arange(len(column.values)) + starts] = column.values
            per_token |= {name: values, HAS_ENTRIES: tokens_with_routes(rows)}
    packed = Packed(
        per_token,
        tuple(lengths.tolist()),
        actions - 1,
        tokens.values[actions],
        offsets_of(per_row),
        tokens.offsets[1:] - 1,
    )
    if place_images is not None and any(rows.get("images") or ()):
        packed = place_images(packed, rows)
    if share_prompts:
        families = families_of(rows, rope_lengths)
        assert families is not None, "rows of several sequences, or without actions, share no prompts"
        # The position of each token in the shared packing, (N,), and for each position there a token of the rows.
        new_positions, chosen, total = torch.empty(len(tokens.values), dtype=torch.int64), list[Tensor](), 0
        offsets = tokens.offsets.tolist()
        for family in families:
            end = total + family.prompt
            first = offsets[family.rows[0]]
            chosen.append(torch.arange(first, first + family.prompt))
            for row, length in zip(family.rows, family.responses, strict=True):
                start, begin = offsets[row], offsets[row] + family.prompt
                new_positions[start:begin] = torch.arange(total, total + family.prompt)
                new_positions[begin : begin + length] = torch.arange(end, end + length)
                chosen.append(torch.arange(begin, begin + length))
                end += length
            total = end
        packed = replace(packed.select(torch.cat(chosen), new_positions), families=tuple(families))
    return packed.to(device)


def tokens_with_routes(rows: Rows) -> Tensor:
    """Return the mask (N,) of tokens with a later action in their sequence: the engine has processed these."""
    count, lengths = len(rows["tokens"].values), rows["sequence_lengths"].values
    sequences = torch.arange(len(lengths)).repeat_interleave(lengths)
    actions = rows["action_mask"].values.nonzero().flatten()
    last = torch.full((len(lengths),), -1).scatter_reduce(0, sequences[actions], actions, "amax")
    return torch.arange(count) < last[sequences]


def families_of(rows: Rows, rope_lengths: RopeLengths = SAME) -> list[Family] | None:
    """Group rows by group, tokens before the first action and rope factors; return None if a row has several sequences
    or no action.
    """
    lengths = rows["tokens"].lengths
    if not torch.equal(rows["sequence_lengths"].values, lengths):
        return None
    offsets, actions = rows["action_mask"].offsets.tolist(), rows["action_mask"].values
    members_by_prompt: dict[tuple[Any, ...], list[tuple[int, int, int]]] = {}
    tokens, groups, images = rows["tokens"].values, rows["group"].tolist(), rows.get("images")
    for row, (start, end) in enumerate(pairwise(offsets)):
        sampled = actions[start:end].nonzero()
        first = int(sampled[0]) if len(sampled) else 0
        if first == 0:
            return None
        name = (
            groups[row],
            rope_lengths.kind(end - start),
            tokens[start : start + first].numpy().tobytes(),
            tuple(str(name) for name, at, _ in images[row] if at < first) if images else (),
        )
        members_by_prompt.setdefault(name, []).append((row, first, end - start - first))
    return [
        Family(members[0][1], tuple(m[2] for m in members), tuple(m[0] for m in members))
        for members in members_by_prompt.values()
    ]


def saves_enough(rows: Rows, rope_lengths: RopeLengths = SAME, compiled: bool = False) -> bool:
    """Return True if sharing prompts saves enough of the tokens, with `compiled` attention or under masks."""
    if not len(rows):
        return False
    families, lengths = families_of(rows, rope_lengths), rows["tokens"].lengths
    total = len(rows["tokens"].values)
    least = LEAST_SAVED_COMPILED if compiled and int(lengths.max()) <= LONGEST else LEAST_SAVED
    return families is not None and total - sum(family.tokens for family in families) >= least * total


def plan_shared(
    rows: Rows, max_tokens: int, rope_lengths: RopeLengths = SAME, image_price: float = 0.0
) -> list[list[int]]:
    """Return each micro-batch's rows, counting shared prompts once and splitting families.

    The work on a token of an image costs `image_price` tokens.

    Raises UserError for a row over the limit.
    """
    parts: list[Family] = []
    for family in families_of(rows, rope_lengths) or []:
        start, block_tokens = 0, family.prompt
        for i, length in enumerate(family.responses):
            if i > start and block_tokens + length > max_tokens:
                parts.append(Family(family.prompt, family.responses[start:i], family.rows[start:i]))
                start, block_tokens = i, family.prompt
            block_tokens += length
        parts.append(Family(family.prompt, family.responses[start:], family.rows[start:]))
    uids = rows.uids()
    tokens, preferred = [part.tokens for part in parts], None
    if image_price:
        images = rows[IMAGE_TOKENS].tolist()
        preferred = Preferred([part.tokens + image_price * images[part.rows[0]] for part in parts])
    plan = plan_micro_batches(tokens, max_tokens, [uids[part.rows[0]] for part in parts], preferred=preferred)
    return [sorted(row for number in batch for row in parts[number].rows) for batch in plan]


@dataclass(frozen=True, eq=False)
class SharedPrompts(AttentionContext):
    """The attention context of consecutively packed families."""

    families: tuple[Family, ...]
    device: torch.device
    _masks: dict[Any, Tensor] = field(default_factory=dict, init=False)

    def mix(self, module: nn.Module, forward: Forward, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Raise ValueError: models with mixers cannot share prompts."""
        raise ValueError(f"{type(module).__name__} cannot continue a prompt's state in several responses")

    def row_lengths(self, positions: Tensor) -> Tensor:
        """Return for each token a length that has the rope factors of its family."""
        longest = torch.tensor([f.prompt + max(f.responses, default=0) for f in self.families], device=positions.device)
        tokens = torch.tensor([f.tokens for f in self.families], device=positions.device)
        return longest.repeat_interleave(tokens)[None]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend with queries (1, H, N, D) to keys and values (1, K, N, D); returns (1, N, H, D).

        Raises ValueError for another N.
        """
        total = sum(family.tokens for family in self.families)
        if query.shape[0] != 1 or query.shape[2] != total:
            raise ValueError(f"families of {total} tokens, but the input is {tuple(query.shape)}")
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
        compiled = attend_compiled(module, query, key, value, scores, *self.sequences)
        return (self._attend_in_blocks(query, key, value, scores) if compiled is None else compiled)[None]

    @cached_property
    def sequences(self) -> tuple[Tensor, int, Tensor]:
        """Return where prompts and responses begin, the longest prompt with a response, and the numbers of prompts."""
        lengths = [length for family in self.families for length in (family.prompt, *family.responses)]
        members = [1 + len(family.responses) for family in self.families]
        longest = max(family.prompt + max(family.responses, default=0) for family in self.families)
        offsets, prompts = (torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (lengths, members))
        return offsets, longest, prompts

    def _attend_in_blocks(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend with queries (N, H, D) to keys and values (N, K, D), family by family; returns (N, H, D)."""
        # split, not slices: the backward of a split is one concatenation
        sizes = [size for family in self.families for size in (family.prompt, *map(sum, family.blocks))]
        queries, keys, values = (states.split(sizes) for states in (query, key, value))
        outputs, part = [], 0
        for number, family in enumerate(self.families):
            prompt = part
            outputs.append(attend_equal(queries[prompt][None], keys[prompt][None], values[prompt][None], scores, True))
            for block in range(len(family.blocks)):
                part += 1
                seen_keys = torch.cat([keys[prompt], keys[part]])
                seen_values = torch.cat([values[prompt], values[part]])
                mask_key = number, block, scores.window, scores.chunk
                if mask_key not in self._masks:
                    # (R, P + R): a token sees the prompt and earlier tokens of its response, as `scores` lets it.
                    of_query = torch.cat([torch.full((n,), i) for i, n in enumerate(family.blocks[block])])
                    of_key = torch.cat([torch.full((family.prompt,), -1), of_query])
                    query_place = torch.cat([torch.arange(n) for n in family.blocks[block]]) + family.prompt
                    key_place = torch.cat([torch.arange(family.prompt), query_place])
                    visible = (of_key == -1) | (of_key == of_query[:, None])
                    visible = visible & scores.visible(query_place[:, None], key_place[None, :])
                    self._masks[mask_key] = visible.to(self.device)
                outputs.append(_masked(queries[part], seen_keys, seen_values, self._masks[mask_key], scores))
            part += 1
        return torch.cat(outputs)


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """Attend with (R, H, D) queries to (P + R, K, D) keys and values under a mask; returns (R, H, D)."""
    if scores.softcap is None and scores.sinks is None:
        return attend_equal(query[None], key[None], value[None], scores, mask=mask)
    queries = query.unflatten(1, (key.shape[1], -1)).permute(1, 2, 0, 3)
    keys, values = (states.transpose(0, 1)[:, None] for states in (key, value))
    sinks = scores.sinks
    if sinks is not None:
        sinks = sinks.view(key.shape[1], -1, 1, 1).expand(-1, -1, len(query), 1)
    hidden = additive(mask, torch.promote_types(query.dtype, torch.float32))
    return attend_plainly(queries, keys, values, scores, hidden, sinks).permute(2, 0, 1, 3).flatten(1, 2)
