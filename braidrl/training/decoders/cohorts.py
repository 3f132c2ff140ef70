"""Decoding with transformers' attention and cache: rows of equal length form a cohort and step together.

    begin:  prompts of one length ──own forward──▶ a cohort: its slots and their transformers cache
    step:   each cohort ──own forward, one token per row──▶ hidden states of its slots

Rows that start together with prompts of one length stay equally long, so a cohort only shrinks. Its batch is padded to
a multiple of 16 rows with copies of the first, so that a row's bits do not depend on the number of rows.

Shapes: B slots in the step, C rows of a cohort with its padding.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from braidrl.training.compute.attention import parameters_of
from braidrl.training.compute.slots import cache_name
from braidrl.training.decoders.body import decoder_of

ROWS = 16
"""Cohorts are padded to a multiple of this many rows."""


@dataclass
class Cohort:
    """Slots with rows of equal length, and their cache."""

    slots: list[int]
    cache: Any


class Cohorts:
    """All rows that one model is decoding."""

    def __init__(self, model: Any) -> None:
        self._model, self._cohorts = model, list[Cohort]()

    def clear(self) -> None:
        self._cohorts.clear()

    def begin(self, prompts: Mapping[int, Tensor]) -> None:
        """Prefill the prompts (P,) of slots, without their last tokens, which the first step computes."""
        self.end(prompts)
        by_length: dict[int, list[int]] = {}
        for slot, prompt in prompts.items():
            by_length.setdefault(len(prompt), []).append(slot)
        for length, slots in by_length.items():
            cohort = Cohort(slots, None)
            if length > 1:
                ids = torch.stack([prompts[slot][:-1] for slot in slots]).to(self._model.device)
                positions = torch.arange(length - 1, device=ids.device).expand(len(slots), -1)
                self._forward(cohort, ids, positions)
            self._cohorts.append(cohort)

    def hidden(self, current: Tensor, position: Tensor) -> Tensor:
        """Return the hidden states (B, D) of the tokens `current` (B,) at `position` (B,); idle slots are 0."""
        hidden: Tensor | None = None
        for cohort in self._cohorts:
            slots = torch.tensor(cohort.slots, device=current.device)
            states = self._forward(cohort, current[slots, None], position[slots, None])
            if hidden is None:
                hidden = states.new_zeros((len(current), states.shape[-1]))
            hidden[slots] = states
        assert hidden is not None, "a step has at least one row"
        return hidden

    def end(self, slots: Iterable[int]) -> None:
        removed = set(slots)
        for cohort in self._cohorts:
            remaining = [row for row, slot in enumerate(cohort.slots) if slot not in removed]
            if 0 < len(remaining) < len(cohort.slots):
                rows = torch.tensor(remaining + remaining[:1] * (-len(remaining) % ROWS), device=self._model.device)
                if cohort.cache is not None:
                    cohort.cache.reorder_cache(rows)
            cohort.slots = [cohort.slots[row] for row in remaining]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.slots]

    def move(self, source: int, target: int) -> None:
        for cohort in self._cohorts:
            cohort.slots = [target if slot == source else slot for slot in cohort.slots]

    def _forward(self, cohort: Cohort, ids: Tensor, positions: Tensor) -> Tensor:
        """Run the model's forward for the rows of a cohort, (S, L), and return the last hidden states (S, D)."""
        decoder = decoder_of(self._model)
        rows = torch.tensor([*range(len(ids)), *[0] * (-len(ids) % ROWS)], device=ids.device)
        name = cache_name(decoder)
        inputs = {"input_ids": ids[rows], "position_ids": positions[rows], "use_cache": True, name: cohort.cache}
        accepted = parameters_of(type(decoder).forward)
        output = decoder(**{key: value for key, value in inputs.items() if key in accepted})
        cohort.cache = getattr(output, name)
        last: Tensor = output.last_hidden_state[: len(ids), -1]
        return last
