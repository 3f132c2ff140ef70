"""A role's worker: one model that infers over rows, accumulates gradients over them, and steps. Roles differ in what they predict.

rows ──plan──▶ micro-batches ──pack──▶ hidden states ──predict──▶ per action or row ──objective──▶ sums ──backward──▶ step
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.config import Config, LoraConfig
from braidrl.data.packing import plan_micro_batches
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.models.backend import Advance, TrainingBackend
from braidrl.models.checkpoint import load_worker, save_worker
from braidrl.models.data_parallel import DataParallel
from braidrl.models.layers import compile_layers
from braidrl.models.layout import ParallelLayout
from braidrl.models.likelihood import Likelihood
from braidrl.models.lora import Adapted, add_adapters, merged, plain_names, train_adapters_only
from braidrl.models.objective import Objective
from braidrl.models.optimizer import MasterOptimizer
from braidrl.models.packed import Packed, nothing, pack
from braidrl.models.parts import local_part, part_of
from braidrl.models.sharded import laid_out
from braidrl.models.shared_prompts import pack_shared, pays, plan_shared
from braidrl.observe.metrics import Sums

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def choose_device(name: str) -> torch.device:
    """`auto` takes the CUDA device where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def model_path(role: str, config: Config) -> Path:
    """The directory that a role's model comes from: its own, or the run's."""
    own = config.roles.get(role)
    return Path((own and own.model) or config.model)


def layout_of(role: str, config: Config) -> ParallelLayout:
    """How a role lies on its devices: as it says itself, or as the run's roles do."""
    own = config.roles.get(role)
    return (own and own.layout) or config.trainer.layout


def lora_of(role: str, config: Config) -> LoraConfig | None:
    """The adapters that a role is trained with, if it is: as it says itself, or as the run's roles do."""
    own = config.roles.get(role)
    return (own and own.lora) or config.trainer.lora


def none_of(predicted: Mapping[str, Tensor]) -> Tensor:
    """A loss of zero that has passed through all that was predicted."""
    return sum((0 * values.sum() for values in predicted.values()), torch.zeros(()))


def layout_key(role: str, config: Config) -> str:
    """Where in the configuration the role's layout stands."""
    own = config.roles.get(role)
    return f"roles.{role}.layout" if own and own.layout else "trainer.layout"


class RoleWorker(TrainingBackend, ABC):
    """A model by its role, the training backend on torch alone. With `train` it holds an optimizer, without it is frozen."""

    def __init__(self, role: str, config: Config, train: bool, ranks: DataParallel | None = None) -> None:
        own = config.roles.get(role)
        self.role, self.config, self.train = role, config, train
        self.device = choose_device(config.device)
        self.path = model_path(role, config)
        self.dtype = DTYPES[(own and own.dtype) or config.dtype]
        self.ranks = laid_out(layout_of(role, config), ranks or DataParallel(), self.device)
        self.lora = lora_of(role, config) if train else None
        self.model = self.load_model(self.path)
        if self.lora:
            add_adapters(self.model, self.lora, config.seed)
        if config.trainer.compile and self.device.type == "cpu":
            compile_layers(self.model)
        self.compute = self.ranks.place(self.model, self.predict)
        # Only now: a model that ranks divide may be too large for one device.
        self.model.to(self.device).requires_grad_(train).eval()
        if self.lora:
            train_adapters_only(self.model)
        self.max_tokens = config.trainer.max_tokens_per_device
        self.optimizer: MasterOptimizer | None = None
        if train:
            peak = own.learning_rate if own and own.learning_rate is not None else config.trainer.learning_rate
            self.optimizer = MasterOptimizer(list(self.model.parameters()), config.trainer, peak, self.ranks)
            if config.trainer.activation_checkpointing:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def holds_its_weights(self) -> bool:
        """True where the module's own parameters are the role's weights, whole: what an engine in this process may share."""
        return self.lora is None and not self.ranks.divided

    @abstractmethod
    def load_model(self, folder: Path) -> Any:
        """The kind of model that this role needs, whole and on the CPU, from a Hugging Face directory."""

    @abstractmethod
    def predict(self, packed: Packed, objective: Objective | Likelihood | None = None) -> dict[str, Tensor]:
        """What a forward pass computes for the objective's loss, by name; without one, what inference needs."""

    def hidden_states(self, packed: Packed) -> Tensor:
        """The last layer's output at each packed token, (N, D)."""
        hidden: Tensor = self.model.base_model(
            input_ids=packed.input_ids[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            sequences=packed.attention(),
        ).last_hidden_state[0]
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

    @torch.no_grad()
    def infer(self, name: str, rows: Rows, advance: Advance | None = None) -> Ragged:
        """What the model predicts under `name` for each row's actions (`scores`: one number for the row), in the order of `rows`."""
        rows, own = self.ranks.pooled(rows)
        order: list[int] = []
        parts: list[Ragged] = []
        for numbers, part in self.rounds(self.micro_batches(rows)):
            packed = self.pack(part) if numbers else nothing(self.device)
            predicted = self.compute(packed)[name]
            if not numbers:
                continue
            offsets = torch.arange(len(part) + 1) if name == "scores" else packed.offsets.to("cpu")
            parts.append(Ragged(predicted.to("cpu"), offsets))
            order += numbers
            if advance and self.ranks.speaks:
                advance(len(part), len(packed.input_ids))
        if not parts:
            return Ragged(torch.empty(0), torch.zeros(1, dtype=torch.int64))
        return Ragged.cat(parts).take(torch.tensor(order).argsort()[own])

    def rounds(self, micro_batches: Iterator[tuple[list[int], Rows]]) -> list[tuple[list[int], Rows]]:
        """The micro-batches, and empty ones where other ranks have more and would wait."""
        found = list(micro_batches)
        return found + [([], Rows({}))] * (self.ranks.rounds(len(found)) - len(found))

    def accumulate(
        self, objective: Objective, rows: Rows, sums: Sums, advance: Advance | None = None
    ) -> dict[str, float]:
        """Adds the gradient sums of `rows`; may be called many times before `step`.

        Returns the loss sums by denominator; metrics per token go to `sums` under the role's name.
        """
        assert self.optimizer is not None, f"{self.role} is not trained"
        totals: dict[str, float] = {}
        rows, _ = self.ranks.pooled(rows)
        self.model.train()
        terms: tuple[Objective | Likelihood, ...] = (objective, *objective.beside)
        for term in terms:
            selected = term.select(rows) if len(rows) else rows
            for numbers, part in self.rounds(self.micro_batches(selected, term.whole_groups)):
                if not numbers:
                    self.optimizer.backward({term.denominator: none_of(self.compute(nothing(self.device), term))})
                    continue
                packed = self.pack(part)
                losses, metrics = term.sums(part, packed.offsets, self.compute(packed, term))
                self.optimizer.backward(losses)
                if not self.ranks.speaks:
                    continue
                for name, loss in losses.items():
                    totals[name] = totals.get(name, 0.0) + float(loss.detach())
                self._count(metrics, sums)
                if advance:
                    advance(len(part) if term is objective else 0, len(packed.input_ids))
        self.model.eval()
        return totals

    def _count(self, metrics: Mapping[str, Tensor], sums: Sums) -> None:
        """Adds numbers per token to the sums, under the role's name."""
        for name, values in metrics.items():
            if name.endswith("_max"):
                sums.highest(f"{self.role}/{name}", values.max())
            else:
                sums.add(f"{self.role}/{name}", values.sum(), len(values))

    def load(self, folder: Path) -> None:
        load_worker(self, folder)

    def export(self, folder: Path, write: bool = True) -> None:
        save_worker(self, folder, write)

    @torch.no_grad()
    def follow(self, source: RoleWorker, decay: float) -> None:
        """Weights become `decay` times their own and the rest another role's. Raises UserError as `move_towards` does."""
        self.move_towards(source.parameters(), source.role, decay)

    def parameters(self) -> dict[str, Tensor | Adapted]:
        """The parameters by their plain names; not the state's names: one that is tied has two of those, and would move twice."""
        self.ranks.settle(self.model)
        return plain_names(self.model, dict(self.model.named_parameters()))

    @torch.no_grad()
    def move_towards(self, theirs: Mapping[str, Tensor | Adapted], source: str, decay: float) -> None:
        """Parameters become `decay` times their own and the rest those of the role `source`.

        Raises UserError for a model of other shapes, and for one with an optimizer, which has weights of its own.
        """
        if self.optimizer is not None:
            raise UserError(f"{self.role} is trained by a loss: it cannot take weights from {source} too")
        self.ranks.settle(self.model)
        ours = dict(self.model.named_parameters())
        if {n: t.shape for n, t in ours.items()} != {n: t.shape for n, t in theirs.items()}:
            raise UserError(f"{self.role} cannot take weights from {source}: {self.path} is another model")
        for name, tensor in ours.items():
            # Two roles may be divided among the ranks in different ways.
            own = local_part(tensor)
            own.lerp_(part_of(merged(theirs[name]), tensor).to(own), 1.0 - decay)

    def step(self, denominators: Mapping[str, float], iteration: int) -> float | None:
        """Divides the accumulated sums by their global counts and updates; the gradient norm, or None if there was nothing."""
        assert self.optimizer is not None, f"{self.role} is not trained"
        self.ranks.settle(self.model)
        return self.optimizer.step(denominators, iteration)
