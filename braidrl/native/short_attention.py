"""Attention within short sequences on the CPU, by a compiled kernel three times as fast as torch's.

It reads queries, keys and values in place, stores no scores, and gives a sequence the same bits in any batch.

Shapes: N tokens packed, H query heads, K key/value heads, D head width.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from braidrl.native.building import FLOAT, INT, LONG, NATIVE, POINTER, address, build, in_memory

SOURCE = NATIVE / "attention.c"
DTYPES = (torch.float32, torch.bfloat16)
LONGEST = 1024
"""Longest sequence (tokens) that the kernel takes: it is 2.4 times as fast as torch's at 512, 1.6 times at 1,024, equal at 2,048."""


def kernel_fits(longest: int, *states: Tensor) -> bool:
    """Return True if the kernel supports sequences of up to `longest` tokens of these (N, heads, D) tensors."""
    return (
        longest <= LONGEST
        and in_memory(*states)
        and len({tensor.dtype for tensor in states}) == 1
        and states[0].dtype in DTYPES
        and all(tensor.stride(-1) == 1 for tensor in states)
        and kernel(states[0].dtype) is not None
    )


def attend_short(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scaling: float, window: int | None
) -> Tensor:
    """Compute causal attention of (N, H, D) to (N, K, D) within the sequences at `offsets` (S + 1,) int32; returns (N, H, D).
    Differentiable.
    """
    return _Attention.apply(query, key, value, offsets, longest, scaling, window or 0)


@cache
def kernel(dtype: torch.dtype) -> Any:
    """Return the compiled function, or None if it cannot be compiled."""
    functions = build(SOURCE, **({"BFLOAT16": 1} if dtype == torch.bfloat16 else {}))
    if functions is None:
        return None
    functions.attention.argtypes = [POINTER] * 9 + [LONG] * 6 + [FLOAT, INT]
    functions.attention.restype = INT
    return functions.attention


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scaling: float, window: int
    ) -> Tensor:
        out = query.new_empty(query.shape)
        ctx.save_for_backward(query, key, value, offsets)
        ctx.numbers = longest, scaling, window
        _call([query, key, value, None, out, None, None], offsets, *ctx.numbers)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, offsets = ctx.saved_tensors
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        # Gradients have the layouts of their inputs.
        found = [torch.empty_like(states) for states in (query, key, value)]
        _call([query, key, value, grad, *found], offsets, *ctx.numbers)
        return *found, None, None, None, None


def _call(states: Sequence[Tensor | None], offsets: Tensor, longest: int, scaling: float, window: int) -> None:
    """Fill the output, or the three gradients. Raises MemoryError."""
    query, key = states[0], states[1]
    assert query is not None and key is not None
    places = [None if each is None else each.data_ptr() for each in states]
    strides = [stride for each in states for stride in (each.stride()[:2] if each is not None else (0, 0))]
    done = kernel(query.dtype)(
        *places, address(offsets, torch.int32), (LONG * len(strides))(*strides),
        len(offsets) - 1, query.shape[1], key.shape[1], query.shape[2], longest, window, scaling, torch.get_num_threads(),
    )  # fmt: skip
    if not done:
        raise MemoryError("no memory for the scores of attention")
