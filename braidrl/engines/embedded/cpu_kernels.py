"""The parts of a decode step on a CPU that are not matrix products, as compiled kernels (`decode.c`).

Shapes: B tokens in the step, R rows, W width, H query heads, K key heads, D head width, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from braidrl.data.token_columns import LOG_PROBS
from braidrl.engines.embedded.slot_states import DRAWS, Pass, SlotStates
from braidrl.native.building import address

BLOCK = 128


class Kernels:
    """Compiled kernels for one head width, a number of query heads per key head and one dtype: float32 or bfloat16."""

    def __init__(self, functions: Any, dtype: torch.dtype) -> None:
        self.dtype, self._functions = dtype, functions

    def add_norm(self, residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        """Add `update` (B, W) to `residual` (B, W) float32 in place, and return its RMS norm times `weight` (W,), (B,
        W).
        """
        out = torch.empty(residual.shape, dtype=self.dtype)
        self._functions.add_norm(
            address(residual, torch.float32),
            None if update is None else address(update, self.dtype),
            address(weight, self.dtype),
            address(out, self.dtype),
            *residual.shape,
            epsilon,
            torch.get_num_threads(),
        )
        return out

    def gated(self, both: Tensor) -> Tensor:
        """Return silu(first half) · second half of `both` (B, 2W), (B, W)."""
        out = torch.empty((len(both), both.shape[1] // 2), dtype=self.dtype)
        self._functions.gated(address(both, self.dtype), address(out, self.dtype), *out.shape, torch.get_num_threads())
        return out

    def attend(
        self,
        projected: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        epsilon: float,
        angles: tuple[Tensor, Tensor],
        slots: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        scaling: float,
    ) -> Tensor:
        """Attend with B new tokens, given their projections; returns (B, H · D). Raises MemoryError.

        Args:
            projected: (B, (H + 2K) · D).
            norms: The weights (D,) of the RMS norms of queries and keys.
            epsilon: The epsilon of these norms.
            angles: Cosines and sines (B, D) float32.
            slots: (B,) int64; the output of a token without a slot, -1, is 0.
            positions: (B,) int64, ascending for the tokens of a slot.
            keys: (slots, K, capacity, D), written at `positions`.
            values: The same shape, written at `positions`.
            window: Number of earlier positions that a query attends to.
            scaling: The factor of the scores.
        """
        rows, (_, key_heads, capacity, width) = len(projected), keys.shape
        out = torch.empty((rows, projected.shape[1] - 2 * key_heads * width), dtype=self.dtype)
        done = self._functions.attend(
            address(projected, self.dtype),
            *([address(n, self.dtype) for n in norms] if norms else [None, None]),
            epsilon,
            *(address(angle, torch.float32) for angle in angles),
            address(slots, torch.int64),
            address(positions, torch.int64),
            address(keys, self.dtype),
            address(values, self.dtype),
            address(out, self.dtype),
            rows,
            key_heads,
            capacity,
            window or 0,
            scaling,
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError("no memory for the scores of a decode step")
        return out

    def lay_out(self, slots: Tensor, guesses: tuple[Tensor, Tensor] | None, states: SlotStates, multiple: int) -> Pass:
        """Return the pass that reads the current token of the rows in these slots (R,), and of each row as many of its
        guesses (R, K) as `guesses` says beside them, (R,). It has a multiple of `multiple` tokens.
        """
        drafts, counts = guesses or (None, None)
        size = len(slots) if counts is None else len(slots) + int(counts.sum())
        size += -size % multiple
        starts, tokens = torch.empty(len(slots) + 1, dtype=torch.int64), torch.empty((6, size), dtype=torch.int64)
        uniforms = torch.empty(size, dtype=torch.float64)
        of_slots = states.current, states.position, states.shift, states.drawn, states.key, states.first_draw
        self._functions.lay_out(
            address(slots, torch.int64),
            *(None if one is None else address(one, torch.int64) for one in (counts, drafts)),
            *(address(integers, torch.int64) for integers in (*of_slots, starts, tokens)),
            address(uniforms, torch.float64),
            len(slots),
            0 if drafts is None else drafts.shape[1],
            size,
        )
        rows, token_slots, ids, numbers, positions, shifts = tokens.unbind()
        return Pass(slots, starts, rows, token_slots, ids, numbers, positions, shifts, uniforms)

    def keep(
        self, read: Pass, drawn: Tensor, values: Mapping[str, Tensor], states: SlotStates
    ) -> tuple[Tensor, int, Tensor]:
        """Append the drawn tokens of a step to its rows' states, up to the first wrong guess; return the mask of kept
        tokens (B,), their number, and the mask of ended rows (R,).

        Args:
            read: The tokens of the step.
            drawn: (B,), the token that was drawn behind each.
            values: The columns of `drawn`, with those of `draw` or, if they were drawn otherwise, log-probs alone.
            states: All slots' states; columns other than log-probs and draws are unchanged.
        """
        tokens, slots = read.tokens, read.row_slots
        kept, ended = torch.zeros(len(tokens), dtype=torch.bool), torch.zeros(len(slots), dtype=torch.bool)
        slot_log_probs, slot_draws = states.per_token[LOG_PROBS], states.per_token.get(DRAWS)
        draws = None
        if slot_draws is not None:
            draws = values[DRAWS] if DRAWS in values else torch.zeros(len(tokens), 3)
        count: int = self._functions.keep(
            *(address(integers, torch.int64) for integers in (tokens, read.starts, slots, drawn)),
            address(values[LOG_PROBS], torch.float32),
            None if draws is None else address(draws, torch.float32),
            address(states.tokens, torch.int64),
            address(slot_log_probs, torch.float32),
            None if slot_draws is None else address(slot_draws, torch.float32),
            *(
                address(integers, torch.int64)
                for integers in (states.current, states.position, states.drawn, states.limit)
            ),
            address(states.stop_token_ids, torch.int64),
            address(kept, torch.bool),
            address(ended, torch.bool),
            len(slots),
            states.tokens.shape[1],
            states.stop_token_ids.shape[1],
        )
        return kept, count, ended

    def draw(
        self, logits: Tensor, temperatures: Tensor | None, greedy: Tensor | None, uniforms: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Draw tokens (B,) from logits (B, V) by `uniforms` (B,) float64, or the likeliest; return them with their
        columns, log-probs and DRAWS, float32.
        """
        rows, vocabulary = logits.shape
        temperatures = torch.ones(rows, dtype=torch.float64) if temperatures is None else temperatures
        greedy = torch.zeros(rows, dtype=torch.bool) if greedy is None else greedy
        tokens, log_probs, draws = torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows, 3)
        sums = torch.empty((rows, -(-vocabulary // BLOCK)), dtype=torch.float64)
        self._functions.draw(
            address(logits, self.dtype),
            address(temperatures, torch.float64),
            address(greedy, torch.bool),
            address(uniforms, torch.float64),
            address(tokens, torch.int64),
            address(log_probs, torch.float32),
            address(draws, torch.float32),
            address(sums, torch.float64),
            rows,
            vocabulary,
            torch.get_num_threads(),
        )
        return tokens, {LOG_PROBS: log_probs, DRAWS: draws}
