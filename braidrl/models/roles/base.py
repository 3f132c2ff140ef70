"""A role's worker: one model that infers over rows, accumulates gradients over them, and steps. Roles differ in what they predict.

rows ──plan──▶ micro-batches ──pack──▶ hidden states ──predict──▶ per action or row ──objective──▶ sums ──backward──▶ step
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.data.packing import plan_micro_batches
from braidrl.data.rows import Rows
from braidrl.models.backend import Advance, TrainingBackend
from braidrl.models.checkpoint import load_worker, save_worker
from braidrl.models.compute.packed import Packed, nothing, pack
from braidrl.models.compute.shared_prompts import pack_shared, pays, plan_shared
from braidrl.models.objective import Objective
from braidrl.models.parallel.replicated import Then
from braidrl.models.roles.likelihood import Likelihood
from braidrl.models.roles.model import RoleModel
from braidrl.observe.metrics import Sums


def zero_loss(predicted: Mapping[str, Tensor]) -> Tensor:
    """A loss of zero that has passed through all that was predicted."""
    return sum((0 * values.sum() for values in predicted.values()), torch.zeros(()))


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed together, their numbers among all, and how they are laid out; of an empty one there are none."""

    numbers: list[int]
    rows: Rows
    packed: Packed


class RoleWorker(RoleModel, TrainingBackend):
    """A role's model as the training backend on torch alone."""

    def micro_batches(self, rows: Rows, whole_groups: bool = False) -> Iterator[tuple[list[int], Rows]]:
        """Row numbers and rows of each micro-batch, of at most `max_tokens_per_device` tokens."""
        if self.shares(rows) and not whole_groups:
            for numbers in plan_shared(rows, self.max_tokens):
                yield numbers, rows.take(numbers)
        elif len(rows):
            groups = rows["group"].tolist() if whole_groups else None
            (plan,) = plan_micro_batches(
                rows["tokens"].lengths.tolist(), 1, self.max_tokens, uids=rows.uids(), groups=groups
            )
            for numbers in plan:
                if numbers:
                    yield numbers, rows.take(numbers)

    def shares(self, rows: Rows) -> bool:
        """True where prompts of these rows go through the model once for all rows that have them."""
        return self.config.trainer.share_prompts and pays(rows)

    def pack(self, rows: Rows) -> Packed:
        """The rows of a micro-batch for one forward pass."""
        return pack_shared(rows, self.device) if self.shares(rows) else pack(rows, self.device)

    def rounds(self, rows: Rows, whole_groups: bool = False) -> list[MicroBatch]:
        """The micro-batches, and empty ones where other ranks have more and would wait."""
        found = [MicroBatch(n, part, self.pack(part)) for n, part in self.micro_batches(rows, whole_groups)]
        empty = MicroBatch([], Rows({}), nothing(self.device))
        return found + [empty] * (self.ranks.rounds(len(found)) - len(found))

    @torch.no_grad()
    def forward(self, name: str, rows: Rows, advance: Advance | None = None) -> Ragged:
        """What the model predicts under `name` for each row's actions (`scores`: one number for the row), in the order of `rows`."""
        rows, own = self.ranks.pooled(rows)
        batches = self.rounds(rows)
        offsets = [torch.arange(len(b.rows) + 1) if name == "scores" else b.packed.offsets.to("cpu") for b in batches]
        sizes = [int(each[-1]) for each in offsets]
        found = torch.empty(sum(sizes), dtype=torch.promote_types(self.dtype, torch.float32))

        def keep(number: int, predicted: dict[str, Tensor]) -> None:
            batch = batches[number]
            if batch.numbers:
                found.split(sizes)[number].copy_(predicted[name])
                self._tell(advance, batch)

        self._over(batches, keep)
        if not len(rows):
            return Ragged(torch.empty(0), torch.zeros(1, dtype=torch.int64))
        parts = self.ranks.shared(found).split(sizes)
        order = torch.tensor([number for batch in batches for number in batch.numbers])
        return Ragged.cat([Ragged(*part) for part in zip(parts, offsets, strict=True)]).take(order.argsort()[own])

    def forward_backward(
        self, objective: Objective, rows: Rows, sums: Sums, advance: Advance | None = None
    ) -> dict[str, float]:
        """Adds the gradient sums of `rows`; may be called many times before `optim_step`.

        Returns the loss sums by denominator; metrics per token go to `sums` under the role's name.
        """
        totals: dict[str, float] = {}
        rows, _ = self.ranks.pooled(rows)
        self.model.train()
        terms: tuple[Objective | Likelihood, ...] = (objective, *objective.beside)
        for term in terms:
            self._forward_backward(term, rows, sums, totals, advance)
        self.model.eval()
        return totals

    def _forward_backward(
        self,
        term: Objective | Likelihood,
        rows: Rows,
        sums: Sums,
        totals: dict[str, float],
        advance: Advance | None,
    ) -> None:
        assert self.optimizer is not None, f"{self.role} is not trained"
        batches = self.rounds(term.select(rows) if len(rows) else rows, term.whole_groups)

        def loss_of(number: int, predicted: dict[str, Tensor]) -> Tensor:
            batch = batches[number]
            if not batch.numbers:
                return zero_loss(predicted)
            losses, metrics = term.sums(batch.rows, batch.packed.offsets, predicted)
            loss = losses[term.denominator]
            if self.ranks.is_reporting_rank:
                totals[term.denominator] = totals.get(term.denominator, 0.0) + float(loss.detach())
                self._count(metrics, sums)
            self._tell(advance, batch, isinstance(term, Objective))
            return loss

        self.optimizer.collect(term.denominator)
        self._over(batches, loss_of, term)

    def _over(self, batches: Sequence[MicroBatch], then: Then, *term: Objective | Likelihood) -> None:
        """Computes the micro-batches, and goes backward where `then` returns a loss."""
        self.ranks.over(
            self.model, lambda packed: self.compute(packed, *term), [batch.packed for batch in batches], then
        )

    def _tell(self, advance: Advance | None, batch: MicroBatch, counts_rows: bool = True) -> None:
        if advance and self.ranks.is_reporting_rank:
            advance(len(batch.rows) if counts_rows else 0, len(batch.packed.input_ids))

    def _count(self, metrics: Mapping[str, Tensor], sums: Sums) -> None:
        """Adds numbers per token to the sums, under the role's name."""
        for name, values in metrics.items():
            if name.endswith("_max"):
                sums.highest(f"{self.role}/{name}", values.max())
            else:
                sums.add(f"{self.role}/{name}", values.sum(), len(values))

    def load(self, folder: Path) -> None:
        load_worker(self, folder)
        self.changes += 1

    def export(self, folder: Path, write: bool = True) -> None:
        save_worker(self, folder, write)

    def optim_step(self, denominators: Mapping[str, float], iteration: int) -> float | None:
        """Divides the accumulated sums by their global counts and updates; the gradient norm, or None if there was nothing."""
        assert self.optimizer is not None, f"{self.role} is not trained"
        self.ranks.settle(self.model)
        norm = self.optimizer.step(denominators, iteration)
        self.changes += norm is not None
        return norm
