"""Rotary embeddings whose factors depend on a row's length: longrope (two sets of factors) and dynamic NTK (a set for
each length).

positions, lengths of their rows ──one call for each set of factors──▶ transformers' own forward ──▶ cos, sin of each
                                                                                                     token's own set

transformers chooses the factors by the greatest position of a call, so that one long row would change all other rows.
Here each token gets the factors of its row, from the same forward.

Shapes: B rows of a batch, N tokens of each.
"""

from collections.abc import Iterator
from inspect import unwrap
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from braidrl.training.compute.attention import lengths_in_batch, running
from braidrl.training.compute.cpu_layers import derived
from braidrl.training.compute.rope_lengths import RopeLengths

FARTHEST = 1 << 62
"""More than any position."""


def use_row_lengths(model: nn.Module) -> None:
    """Make a model's rotary embeddings compute each token with the factors of its row."""
    for module in model.modules():
        kind: Any = type(module)
        names = getattr(module, "rope_type", None)
        names = [names] if isinstance(names, str) else names.values() if isinstance(names, dict) else []
        depends_on_length = any(name == "longrope" or "dynamic" in name for name in names)
        if depends_on_length and not hasattr(kind, "plain_forward"):
            module.__class__ = derived(kind, rotary_forward)


def rotary_forward(self: Any, x: Tensor, position_ids: Tensor, *arguments: Any, **named: Any) -> Any:
    """Return the rotary embedding of positions (..., B, N), each by the factors of its row."""
    if x.is_meta:
        return unwrap(self.plain_forward)(x, position_ids, *arguments, **named)
    context, result = running.get(), None
    lengths = lengths_in_batch(position_ids) if context is None else context.row_lengths(position_ids)
    for length, most, rows in _sets_of_factors(self, lengths):
        _forget(self)
        # transformers reads the greatest position of a call.
        last = torch.full_like(position_ids[..., :1], length - 1)
        computed = self.plain_forward(x, torch.cat([position_ids.clamp(max=most), last], -1), *arguments, **named)
        parts = [part[..., :-1, :] for part in (computed if isinstance(computed, tuple) else (computed,))]
        before = parts if result is None else result
        result = [torch.where(rows[..., None], new, old) for new, old in zip(parts, before, strict=True)]
    assert result is not None
    return tuple(result) if isinstance(computed, tuple) else result[0]


def _sets_of_factors(module: Any, lengths: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Iterate over the sets of rope factors, those of short rows first.

    Each set comes with a row length that uses it, the greatest position of such rows, and the mask (B, N) of tokens
    whose rows use this set or a later one.
    """
    rope = RopeLengths.of(module.config)
    if rope.growing is not None:
        every = torch.cat([lengths.flatten(), lengths.new_tensor(rope.switches)]).clamp(min=rope.growing)
        for length in every.unique().tolist():
            yield length, length - 1, lengths >= length
        return
    for before, end in pairwise((0, *rope.switches, FARTHEST)):
        yield before + 1 if end == FARTHEST else end, end - 1, lengths > before


def _forget(module: Any) -> None:
    """Remove cached values of earlier calls from a rotary embedding."""
    for name in list(vars(module)):
        if name.endswith("max_seq_len_cached"):
            setattr(module, name, module.original_max_seq_len)
        elif name.endswith("long_inv_freq"):
            delattr(module, name)
    for name, buffer in list(module.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            # In place: transformers 5.24 writes into this buffer too.
            getattr(module, name.replace("original_", "")).copy_(buffer)
