"""A role's worker: one model that infers over rows, accumulates gradients over them, and steps. Roles differ in what they predict.

rows ──plan──▶ micro-batches ──pack──▶ hidden states ──predict──▶ per action or row ──objective──▶ sums ──backward──▶ step
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.config import Config
from braidrl.data.packing import plan_micro_batches
from braidrl.data.rows import Rows
from braidrl.models.backend import Advance, TrainingBackend
from braidrl.models.checkpoint import load_worker, save_worker
from braidrl.models.data_parallel import DataParallel, Then
from braidrl.models.host_memory import keep_freed_memory
from braidrl.models.layers import compile_layers
from braidrl.models.likelihood import Likelihood
from braidrl.models.lora import add_adapters, train_adapters_only
from braidrl.models.objective import Objective
from braidrl.models.offload import Movable
from braidrl.models.optimizer import MasterOptimizer
from braidrl.models.packed import Packed, nothing, pack
from braidrl.models.parts import shapes_of
from braidrl.models.pipeline import HIDDEN
from braidrl.models.role_settings import DTYPES, choose_device, layout_of, lora_of, model_path
from braidrl.models.sharded import laid_out
from braidrl.models.shared_prompts import pack_shared, pays, plan_shared
from braidrl.models.weight_files import Filling
from braidrl.observe.metrics import Sums


def none_of(predicted: Mapping[str, Tensor]) -> Tensor:
    """A loss of zero that has passed through all that was predicted."""
    return sum((0 * values.sum() for values in predicted.values()), torch.zeros(()))


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed together, their numbers among all, and how they are laid out; of an empty one there are none."""

    numbers: list[int]
    rows: Rows
    packed: Packed


class RoleWorker(TrainingBackend, ABC):
    """A model by its role, the training backend on torch alone. With `train` it holds an optimizer, without it is frozen."""

    def __init__(
        self, role: str, config: Config, train: bool, ranks: DataParallel | None = None, copies: bool = False
    ) -> None:
        """One that `copies` is frozen, and its weights come from a worker that is trained."""
        own = config.roles.get(role)
        self.role, self.config, self.train, self.copies = role, config, train, copies
        self.changes = 0
        """How often the weights have become others."""
        self.device = choose_device(config.device)
        keep_freed_memory()
        self.path = model_path(role, config)
        self.dtype = DTYPES[(own and own.dtype) or config.dtype]
        self.ranks = laid_out(layout_of(role, config), ranks or DataParallel(), self.device)
        self.lora = lora_of(role, config) if train else None
        # Ranks that divide a model read it part by part. Adapters are drawn for a whole one.
        self.model = self.load_model(self.path, self.ranks.divided and not self.lora)
        self.base_shapes = shapes_of(self.model)
        if self.lora:
            add_adapters(self.model, self.lora, config.seed)
        self.shapes = shapes_of(self.model)
        if config.trainer.compile and self.device.type == "cpu":
            compile_layers(self.model)
        predict = self.predict if self.ranks.predicts else self.pass_on
        self.compute = self.ranks.place(self.model, predict, Filling(self.path, self.model))
        # Only now: a model that ranks divide may be too large for one device.
        self.model.to(self.device).requires_grad_(train).eval()
        if self.lora:
            train_adapters_only(self.model)
        self.max_tokens = config.trainer.max_tokens_per_device
        self.optimizer: MasterOptimizer | None = None
        if train:
            peak = own.learning_rate if own and own.learning_rate is not None else config.trainer.learning_rate
            names, parameters = zip(*self.model.named_parameters(), strict=True)
            places = [list(self.shapes).index(name) for name in names]
            self.optimizer = MasterOptimizer(parameters, config.trainer, peak, self.ranks, places)
            if config.trainer.activation_checkpointing:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.background: dist.ProcessGroup | None = None
        """In which the ranks meet that write a checkpoint while they train."""
        self.movable = {"weights": Movable(self._weights)}
        """What can be put away while other roles need the device."""
        if self.optimizer is not None:
            self.movable["optimizer"] = Movable(self.optimizer.tensors)

    def _weights(self) -> list[Tensor]:
        self.ranks.settle(self.model)
        return list(self.model.parameters())

    @property
    def holds_its_weights(self) -> bool:
        """True where the module's own parameters are the role's weights, whole: what an engine in this process may share."""
        return self.lora is None and not self.ranks.divided

    @abstractmethod
    def load_model(self, folder: Path, unread: bool = False) -> Any:
        """The kind of model that this role needs from a Hugging Face directory: whole, on the CPU, or its weights still `unread`."""

    @abstractmethod
    def predict(self, packed: Packed, objective: Objective | Likelihood | None = None) -> dict[str, Tensor]:
        """What a forward pass computes for the objective's loss, by name; without one, what inference needs."""

    def pass_on(self, packed: Packed, objective: Objective | Likelihood | None = None) -> dict[str, Tensor]:
        """In place of `predict` where another rank has the last layers."""
        return {HIDDEN: self._through_layers(packed)}

    def hidden_states(self, packed: Packed) -> Tensor:
        """The last layer's output at each packed token, (N, D)."""
        return self._through_layers(packed)[0]

    def _through_layers(self, packed: Packed) -> Tensor:
        """What comes out of the last layer that this rank has, (1, N, D)."""
        hidden: Tensor = self.model.base_model(
            input_ids=packed.input_ids[None] if packed.hidden is None else None,
            inputs_embeds=packed.hidden,
            position_ids=packed.position_ids[None],
            use_cache=False,
            sequences=packed.attention(),
        ).last_hidden_state
        return hidden

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
    def infer(self, name: str, rows: Rows, advance: Advance | None = None) -> Ragged:
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

    def accumulate(
        self, objective: Objective, rows: Rows, sums: Sums, advance: Advance | None = None
    ) -> dict[str, float]:
        """Adds the gradient sums of `rows`; may be called many times before `step`.

        Returns the loss sums by denominator; metrics per token go to `sums` under the role's name.
        """
        totals: dict[str, float] = {}
        rows, _ = self.ranks.pooled(rows)
        self.model.train()
        terms: tuple[Objective | Likelihood, ...] = (objective, *objective.beside)
        for term in terms:
            self._accumulate(term, rows, sums, totals, advance)
        self.model.eval()
        return totals

    def _accumulate(
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
                return none_of(predicted)
            losses, metrics = term.sums(batch.rows, batch.packed.offsets, predicted)
            loss = losses[term.denominator]
            if self.ranks.speaks:
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
        if advance and self.ranks.speaks:
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

    def step(self, denominators: Mapping[str, float], iteration: int) -> float | None:
        """Divides the accumulated sums by their global counts and updates; the gradient norm, or None if there was nothing."""
        assert self.optimizer is not None, f"{self.role} is not trained"
        self.ranks.settle(self.model)
        norm = self.optimizer.step(denominators, iteration)
        self.changes += norm is not None
        return norm
