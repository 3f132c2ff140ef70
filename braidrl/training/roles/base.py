"""A role's worker: forward passes over rows, gradient accumulation and optimizer steps. Subclasses define the predictions.

rows ──plan──▶ micro-batches ──pack──▶ hidden states ──predict──▶ per action or row ──objective──▶ sums ──backward──▶ optim_step
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.data.packing import plan_micro_batches
from braidrl.data.rows import Rows
from braidrl.observe.metrics import Sums
from braidrl.training.backends import Advance, ShardedBackend
from braidrl.training.compute.packed import Packed, pack, plan_shared, saves_enough
from braidrl.training.decoders.body import PACKED, plan_of_model, set_training
from braidrl.training.lora import plain_names
from braidrl.training.objective import Likelihood, Objective, nonfinite_tokens
from braidrl.training.parallel.replicated import OnPrediction
from braidrl.training.role_settings import merges_adapters
from braidrl.training.roles.checkpoint import full_state_dict, load_worker, saving_tasks
from braidrl.training.roles.model import RoleModel
from braidrl.weights.shards import WeightPart, storages, weight_parts


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch: its rows, their numbers in the batch, and their packing; an empty one has no rows."""

    numbers: list[int]
    rows: Rows
    packed: Packed


class RoleWorker(RoleModel, ShardedBackend):
    """The built-in training backend on plain torch."""

    _nonfinite: tuple[str, ...] = ()

    def shares_prompts(self, rows: Rows) -> bool:
        """Return whether shared prompts of these rows are computed once."""
        return self.config.trainer.share_prompts and plan_of_model(self.model) == PACKED and saves_enough(rows)

    def plan(self, rows: Rows, whole_groups: bool = False) -> list[list[int]]:
        """Return the indices of the rows of each micro-batch, which has at most `max_tokens_per_device` tokens.

        Args:
            rows: This rank's rows.
            whole_groups: Keep the rows of a group together.
        """
        if self.shares_prompts(rows) and not whole_groups:
            return plan_shared(rows, self.max_tokens)
        if not len(rows):
            return []
        groups = rows["group"].tolist() if whole_groups else None
        (plan,) = plan_micro_batches(
            rows["tokens"].lengths.tolist(), 1, self.max_tokens, uids=rows.uids(), groups=groups
        )
        return [numbers for numbers in plan if numbers]

    def micro_batches(self, rows: Rows, whole_groups: bool = False) -> list[MicroBatch]:
        """Pack the micro-batches of `plan`, and pad them with empty ones to the number that all ranks run."""
        found = []
        for numbers in self.plan(rows, whole_groups):
            part = rows.take(numbers)
            found.append(MicroBatch(numbers, part, pack(part, self.device, self.shares_prompts(part))))
        # A filler token without rows or actions, for a rank that only joins the collectives of a forward pass.
        none, one = (torch.zeros(count, dtype=torch.int64, device=self.device) for count in (0, 1))
        filler = Packed(one, one, (1,), none, none, torch.zeros(1, dtype=torch.int64), none)
        empty = MicroBatch([], Rows({}), filler)
        return found + [empty] * (self.ranks.num_micro_batches(len(found)) - len(found))

    def _run(self, batches: Sequence[MicroBatch], on_prediction: OnPrediction, *term: Objective | Likelihood) -> None:
        packed = [batch.packed for batch in batches]
        self.ranks.run_micro_batches(self.model, lambda each: self.compute(each, *term), packed, on_prediction)

    @torch.no_grad()
    def forward(self, name: str, rows: Rows, advance: Advance | None = None) -> Ragged:
        rows, own = self.ranks.gather_rows(rows)
        batches = self.micro_batches(rows)
        offsets = [torch.arange(len(b.rows) + 1) if name == "scores" else b.packed.offsets for b in batches]
        sizes = [int(each[-1]) for each in offsets]
        found = torch.empty(sum(sizes), dtype=torch.promote_types(self.dtype, torch.float32))

        def keep(number: int, predicted: dict[str, Tensor]) -> None:
            batch = batches[number]
            if batch.numbers:
                found.split(sizes)[number].copy_(predicted[name])
                if advance and self.ranks.is_reporting_rank:
                    advance(len(batch.rows), len(batch.packed.input_ids))

        self._run(batches, keep)
        if not len(rows):
            return Ragged(torch.empty(0), torch.zeros(1, dtype=torch.int64))
        parts = self.ranks.broadcast_predictions(found).split(sizes)
        order = torch.tensor([number for batch in batches for number in batch.numbers])
        return Ragged.cat([Ragged(*part) for part in zip(parts, offsets, strict=True)]).take(order.argsort()[own])

    def forward_backward(
        self, objective: Objective, rows: Rows, sums: Sums, advance: Advance | None = None
    ) -> dict[str, float]:
        assert self.optimizer is not None, f"{self.role} is not trained"
        totals: dict[str, float] = {}
        rows, _ = self.ranks.gather_rows(rows)

        def loss_of(
            term: Objective | Likelihood, batches: list[MicroBatch], number: int, predicted: dict[str, Tensor]
        ) -> Tensor:
            batch = batches[number]
            if not batch.numbers:
                # A zero loss over every output, so that all ranks run the same collectives.
                return sum((0 * values.sum() for values in predicted.values()), torch.zeros(()))
            losses, metrics = term.sums(batch.rows, batch.packed.offsets, predicted)
            loss = losses[term.denominator]
            if self.ranks.is_reporting_rank:
                total = float(loss.detach())
                totals[term.denominator] = totals.get(term.denominator, 0.0) + total
                if not math.isfinite(total):
                    self._nonfinite += (nonfinite_tokens(batch.rows, batch.packed.offsets, predicted),)
                sums.add_per_token(self.role, metrics)
                if advance:
                    advance(len(batch.rows) if term is objective else 0, len(batch.packed.input_ids))
            return loss

        set_training(self.model, True)
        terms: tuple[Objective | Likelihood, ...] = (objective, *objective.auxiliary)
        for term in terms:
            batches = self.micro_batches(term.select(rows) if len(rows) else rows, term.whole_groups)
            self.optimizer.collect(term.denominator)
            self._run(batches, partial(loss_of, term, batches), term)
        set_training(self.model, False)
        return totals

    @property
    def shared_model(self) -> Any:
        """Return the model, with its adapters, if an engine of this process may share it, else None."""
        return None if self.ranks.is_sharded or merges_adapters(self.lora, self.config) else self.model

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield every full tensor of the model, adapters merged; all ranks of a sharded model call this at the same time."""
        return full_state_dict(self).items()

    def weights(self) -> Mapping[str, WeightPart]:
        """Return the local shards by name, with adapters that are merged on demand."""
        self.ranks.reshard(self.model)
        return weight_parts(plain_names(self.model, self.model.state_dict(keep_vars=True)))

    def bytes_of(self, part: str) -> int:
        if part == "weights":
            return sum(storage.nbytes() for storage in storages(self.model.parameters()))
        return self.optimizer.bytes_in_use if self.optimizer is not None else 0

    def load(self, folder: Path) -> None:
        load_worker(self, folder)
        self.weight_updates += 1
        self._nonfinite = ()

    def export(self, folder: Path, write: bool = True) -> None:
        for part in saving_tasks(self, folder, write):
            part()

    def optim_step(self, denominators: Mapping[str, float], iteration: int) -> float | None:
        assert self.optimizer is not None, f"{self.role} is not trained"
        self.ranks.reshard(self.model)
        norm = self.optimizer.step(denominators, iteration)
        self.nonfinite, self._nonfinite = self._nonfinite, ()
        self.weight_updates += norm is not None and math.isfinite(norm)
        return norm
