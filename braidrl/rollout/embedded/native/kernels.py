"""The compiled kernels as functions of tensors, with what C cannot check checked here."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from braidrl.models.cpu.native.building import FLOAT, INT, LONG, POINTER, address, build

BLOCK = 128
SOURCE = Path(__file__).parent / "decode.c"
ARGUMENTS: dict[str, Sequence[type]] = {
    "add_norm": [POINTER] * 4 + [LONG] * 2 + [FLOAT, INT],
    "gated": [POINTER] * 2 + [LONG] * 2 + [INT],
    "attend": [POINTER] * 3 + [FLOAT] + [POINTER] * 6 + [LONG] * 4 + [FLOAT, INT],
    "draw": [POINTER] * 7 + [LONG] * 2 + [INT],
}


class Kernels:
    """Kernels for one head width, one number of query heads per key head and one dtype: float32 or bfloat16."""

    def __init__(self, functions: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype, self._functions = dtype, functions
        for name, types in ARGUMENTS.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = types, ctypes.c_int if name == "attend" else None

    @staticmethod
    def of(head_width: int, group: int, dtype: torch.dtype) -> "Kernels | None":
        """Compile the kernels; None where no compiler works."""
        half = {"BFLOAT16": 1} if dtype == torch.bfloat16 else {}
        functions = build(SOURCE, HEAD=head_width, GROUP=group, **half)
        return None if functions is None else Kernels(functions, dtype)

    def add_norm(self, residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        """Add `update` (B, W) to `residual` (B, W) float32 in place, and return its RMS norm times `weight` (W,), (B, W)."""
        out = torch.empty(residual.shape, dtype=self.dtype)
        self._functions.add_norm(
            address(residual, torch.float32), None if update is None else address(update, self.dtype),
            address(weight, self.dtype), address(out, self.dtype), *residual.shape, epsilon, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def gated(self, both: Tensor) -> Tensor:
        """Return silu(first half) · second half of `both` (B, 2W), (B, W)."""
        out = torch.empty((len(both), both.shape[1] // 2), dtype=self.dtype)
        self._functions.gated(address(both, self.dtype), address(out, self.dtype), *out.shape, torch.get_num_threads())
        return out

    def attend(
        self, projected: Tensor, norms: tuple[Tensor, Tensor] | None, epsilon: float, angles: tuple[Tensor, Tensor],
        positions: Tensor, keys: Tensor, values: Tensor, window: int | None, scaling: float,
    ) -> Tensor:  # fmt: skip
        """Attend with B slots' new tokens, given their projections; returns (B, H · D). Raises MemoryError.

        Args:
            projected: (B, (H + 2K) · D).
            norms: The weights (D,) of the RMS norms of queries and keys.
            epsilon: Of these norms.
            angles: Cosines and sines (B, D) float32.
            positions: (B,) int64.
            keys: (slots, K, capacity, D), written at `positions`.
            values: The same shape, written at `positions`.
            window: How far back a query sees.
            scaling: Of the scores.
        """
        rows, (_, key_heads, capacity, width) = len(projected), keys.shape
        out = torch.empty((rows, projected.shape[1] - 2 * key_heads * width), dtype=self.dtype)
        done = self._functions.attend(
            address(projected, self.dtype), *([address(n, self.dtype) for n in norms] if norms else [None, None]), epsilon,
            *(address(angle, torch.float32) for angle in angles), address(positions, torch.int64),
            address(keys, self.dtype), address(values, self.dtype), address(out, self.dtype),
            rows, key_heads, capacity, window or 0, scaling, torch.get_num_threads(),
        )  # fmt: skip
        if not done:
            raise MemoryError("no memory for the scores of a decode step")
        return out

    def draw(self, logits: Tensor, temperatures: Tensor, greedy: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw tokens (B,) at the rows' temperatures from logits (B, V), and return them with their log-probs (B,) float32.

        `uniforms` (B,) float64 decide the tokens; where `greedy` (B,) it is the likeliest.
        """
        rows, vocabulary = logits.shape
        tokens, log_probs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        sums = torch.empty((rows, -(-vocabulary // BLOCK)), dtype=torch.float64)
        self._functions.draw(
            address(logits, self.dtype), address(temperatures, torch.float64), address(greedy, torch.bool),
            address(uniforms, torch.float64), address(tokens, torch.int64), address(log_probs, torch.float32),
            address(sums, torch.float64), rows, vocabulary, torch.get_num_threads(),
        )  # fmt: skip
        return tokens, log_probs
