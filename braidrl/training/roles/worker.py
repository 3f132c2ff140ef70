"""The built-in training backend: a rank's part of one role on plain torch, its micro-batches, and copies of its weights.

folder ──read──▶ model ──adapters──▶ sharded ──▶ optimizer

rows ──plan──▶ micro-batches ──pack──▶ hidden states ──predict──▶ per action or row ──objective──▶ sums ──backward──▶ optim_step

tokens       p  p  p  a1 a2 a3
log_probs             l1 l2 l3       of each action, by an actor or a reference
values             v1 v2 v3          of the state before each action, by a critic, at the predicting position
score                     s          of the row, by a reward model, at its last token

Weights are copied to infer in another layout, or to a role that follows another one (target network, EMA), which then has
own = decay · own + (1 - decay) · source:

training layout   step ─ step ──────────── step ─
                              ╲ moves             ╲          block by block, if the weights have changed when the copy is used
another layout                 infer ─ infer       infer
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.devices import choose_device
from braidrl.config import Config
from braidrl.data.packing import plan_micro_batches
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.flow import Flow
from braidrl.native.malloc import keep_freed_memory
from braidrl.observe.metrics import Sums
from braidrl.training.backends import BACKENDS, Advance, BackendSpec, ShardedBackend, TrainingBackend
from braidrl.training.compute.cpu_layers import compile_layers
from braidrl.training.compute.cuda_layers import use_kernels
from braidrl.training.compute.packed import Packed, pack, plan_shared, saves_enough
from braidrl.training.decoders.body import PACKED, checkpoint_activations, plan_of_model, run_body, set_training
from braidrl.training.decoders.head import predicted_log_probs
from braidrl.training.loading import load_decoder, load_scorer
from braidrl.training.lora import FourBitLinear, adapters_of, add_adapters, is_adapter, plain_names
from braidrl.training.memory.offload import OffloadableTensors
from braidrl.training.objective import Likelihood, Objective, nonfinite_tokens
from braidrl.training.optimizer import MasterOptimizer
from braidrl.training.parallel.layouts import DataParallel, apply_layout
from braidrl.training.parallel.pipeline import HIDDEN
from braidrl.training.role_settings import merges_adapters, settings_of
from braidrl.training.roles.checkpoint import full_state_dict, load_worker, saving_tasks, side_files
from braidrl.weights.checkpoint_files import ParameterReader
from braidrl.weights.model_files import ModelFiles
from braidrl.weights.publisher import TransferVolume
from braidrl.weights.shards import Parts, WeightPart, shapes_of, storages, weight_parts
from braidrl.weights.transfer import LIMIT_BYTES, LayoutCopy

FAST_LAYERS = {"cpu": compile_layers, "cuda": use_kernels}
"""Functions that switch a model to faster kernels, by device type."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch: its rows, their numbers in the batch, and their packing; an empty one has no rows."""

    numbers: list[int]
    rows: Rows
    packed: Packed


class RoleWorker(ShardedBackend):
    """A rank's part of one role: a decoder, or with `is_scalar` a critic or reward model; without `train` it is frozen."""

    def __init__(
        self, role: str, config: Config, train: bool, ranks: DataParallel | None = None, is_copy: bool = False,
        is_scalar: bool = False,
    ) -> None:  # fmt: skip
        """Load the model; with `is_copy` it is frozen and receives its weights from a trained one."""
        self.role, self.config, self.train, self.is_copy, self.is_scalar = role, config, train, is_copy, is_scalar
        self.weight_updates, self._nonfinite = 0, list[str]()
        self.device = choose_device(config.device)
        keep_freed_memory()
        own = settings_of(role, config)
        self.path, self.dtype, self.max_tokens = own.model, own.dtype, own.max_tokens
        self.ranks = apply_layout(own.layout, ranks or DataParallel(), self.device)
        self.lora = own.lora if train else None
        # A sharded model is read part by part, except with adapters, which are initialised on the full model.
        self.model = self.load_model(self.path, self.ranks.is_sharded and not self.lora)
        self.base_shapes = shapes_of(self.model)
        if self.lora:
            add_adapters(self.model, self.lora, config.seed)
            for module in list(self.model.modules()) if self.lora.base_dtype else ():
                if isinstance(base := getattr(module, "base_layer", None), nn.Linear):
                    module.base_layer = FourBitLinear(base)
        self.shapes = shapes_of(self.model)
        if config.trainer.compile:
            FAST_LAYERS[self.device.type](self.model)
        files = ModelFiles(self.path.expanduser(), self.model)
        # All pipeline ranks but the last pass hidden states on.
        predict = self.predict if self.ranks.has_predictions else lambda p, *_: {HIDDEN: self.hidden_states(p)[None]}
        self.compute = self.ranks.parallelize(self.model, predict, ParameterReader(self.path, self.model, files=files))
        # Only after sharding: the full model may be too large for one device.
        self.model.to(self.device).eval()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(train and (not self.lora or is_adapter(name)))
        self.optimizer: MasterOptimizer | None = None
        offloadable = {"weights": OffloadableTensors(self._local_parameters)}
        self.side_files: dict[str, bytes] | None = None
        """A checkpoint's files beside its weights, by name, written now so that no checkpoint fails on one."""
        self.background: dist.ProcessGroup | None = None
        """The process group for writing a checkpoint during training."""
        if train:
            names, parameters = zip(*self.model.named_parameters(), strict=True)
            places = {name: number for number, name in enumerate(self.shapes)}
            numbers = [places[name] for name in names]
            self.optimizer = MasterOptimizer(parameters, config.trainer, own.learning_rate, self.ranks, numbers)
            offloadable["optimizer"] = OffloadableTensors(self.optimizer.tensors)
            if not self.lora:  # adapted layers have other names
                self.optimizer.read_masters(names, files)
            if own.activation_checkpointing:
                checkpoint_activations(self.model)
            if not dist.is_initialized() or dist.get_rank() == 0:  # the rank that writes them
                self.side_files = side_files(self.model, self.path)
        self.offloadable = offloadable

    def _local_parameters(self) -> list[Tensor]:
        self.ranks.reshard(self.model)
        return list(self.model.parameters())

    def load_model(self, folder: Path, on_meta: bool = False) -> Any:
        """Load this role's kind of model from a Hugging Face directory, on the CPU or with parameters left `on_meta`."""
        if self.is_scalar:
            return load_scorer(folder, self.dtype, fresh_head=self.train or self.is_copy, on_meta=on_meta)
        return load_decoder(folder, self.dtype, on_meta=on_meta)

    def hidden_states(self, packed: Packed) -> Tensor:
        """Return the output of this rank's last layer for each packed token, (N, D)."""
        ids = packed.input_ids[None] if packed.hidden is None else None
        return run_body(self.model, ids, packed.position_ids[None], packed.attention(), packed.hidden)[0]

    def predict(self, packed: Packed, objective: Objective | Likelihood | None = None) -> dict[str, Tensor]:
        """Compute the outputs that the loss needs, by name; without an objective, the outputs of inference.

        A decoder gives `log_probs` and `entropy` of the A action tokens, (A,) float32 or float64 in nats at the run's temperature, a
        scalar model `values` (A,) and `scores` (B,), one per row.
        """
        hidden = self.hidden_states(packed)
        if not self.is_scalar:
            log_probs, entropy = predicted_log_probs(
                self.model, hidden[packed.predictors], packed.targets, self.config.rollout.temperature,
                with_entropy_grad=objective is not None and objective.entropy_coef != 0, compiled=self.config.trainer.compile,
            )  # fmt: skip
            return {"log_probs": log_probs, "entropy": entropy}
        wanted = {"values": packed.predictors, "scores": packed.row_ends}
        if objective is not None:
            wanted = {name: places for name, places in wanted.items() if name in objective.loss.reads}
        # At least float32: returns and margins need more precision than bfloat16.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        weight = self.model.score.weight.to(dtype)
        return {name: (hidden[places].to(dtype) @ weight.T).squeeze(-1) for name, places in wanted.items()}

    def shares_prompts(self, rows: Rows) -> bool:
        """Return whether shared prompts of these rows are computed once."""
        return self.config.trainer.share_prompts and plan_of_model(self.model) == PACKED and saves_enough(rows)

    def micro_batches(self, rows: Rows, whole_groups: bool = False) -> list[MicroBatch]:
        """Pack this rank's rows into micro-batches of at most `max_tokens` tokens, and add empty ones up to the number that all ranks run.

        With `whole_groups`, the rows of a group stay together.
        """
        # Decided for all rows: a part that saves little alone would without sharing be over the limit that it was planned for.
        plan, shares = list[list[int]](), self.shares_prompts(rows)
        if shares and not whole_groups:
            plan = plan_shared(rows, self.max_tokens)
        elif len(rows):
            groups = rows["group"].tolist() if whole_groups else None
            (plan,) = plan_micro_batches(
                rows["tokens"].lengths.tolist(), 1, self.max_tokens, uids=rows.uids(), groups=groups
            )
        found = []
        for numbers in filter(None, plan):
            part = rows.take(numbers)
            found.append(MicroBatch(numbers, part, pack(part, self.device, shares)))
        # A filler token without rows or actions, for a rank that only joins the collectives of a forward pass.
        none, one = (torch.zeros(count, dtype=torch.int64, device=self.device) for count in (0, 1))
        filler = Packed(one, one, (1,), none, none, torch.zeros(1, dtype=torch.int64), none)
        return found + [MicroBatch([], Rows({}), filler)] * (self.ranks.num_micro_batches(len(found)) - len(found))

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

        self.ranks.run_micro_batches(self.model, self.compute, [batch.packed for batch in batches], keep)
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
        set_training(self.model, True)
        terms: tuple[Objective | Likelihood, ...] = (objective, *objective.auxiliary)
        for term in terms:
            batches = self.micro_batches(term.select(rows) if len(rows) else rows, term.whole_groups)
            self.optimizer.collect(term.denominator)

            def loss_of(
                number: int, predicted: dict[str, Tensor], term: Objective | Likelihood = term, batches: list[MicroBatch] = batches
            ) -> Tensor:  # fmt: skip
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
                        self._nonfinite.append(nonfinite_tokens(batch.rows, batch.packed.offsets, predicted))
                    sums.add_per_token(self.role, metrics)
                    if advance:
                        advance(len(batch.rows) if term is objective else 0, len(batch.packed.input_ids))
                return loss

            self.ranks.run_micro_batches(
                self.model, lambda packed, term=term: self.compute(packed, term), [batch.packed for batch in batches], loss_of
            )  # fmt: skip
        set_training(self.model, False)
        return totals

    @property
    def shared_model(self) -> Any:
        """Return the model, with its adapters, if an engine of this process may share it, else None."""
        return None if self.ranks.is_sharded or merges_adapters(self.lora, self.config) else self.model

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield every full tensor of the model, adapters merged; all ranks of a sharded model call this at the same time."""
        return full_state_dict(self).items()

    def weights(self, adapters_alone: bool = False) -> Mapping[str, WeightPart]:
        """Return the local shards by name, adapters merged on demand; with `adapters_alone`, only trained parameters by peft's names."""
        self.ranks.reshard(self.model)
        if adapters_alone:
            return weight_parts(adapters_of(dict(self.model.named_parameters())))
        return weight_parts(plain_names(self.model, self.model.state_dict(keep_vars=True)))

    def bytes_of(self, part: str) -> int:
        if part == "weights":
            return sum(storage.nbytes() for storage in storages(self.model.parameters()))
        return self.optimizer.bytes_in_use if self.optimizer is not None else 0

    def load(self, folder: Path) -> None:
        load_worker(self, folder)
        self.weight_updates += 1
        self._nonfinite.clear()

    def export(self, folder: Path, write: bool = True) -> None:
        for part in saving_tasks(self, folder, write):
            part()

    def optim_step(self, denominators: Mapping[str, float], iteration: int) -> float | None:
        assert self.optimizer is not None, f"{self.role} is not trained"
        self.ranks.reshard(self.model)
        norm = self.optimizer.step(denominators, iteration)
        self.nonfinite, self._nonfinite = tuple(self._nonfinite), []
        self.weight_updates += norm is not None and math.isfinite(norm)
        return norm


def make_worker(
    role: str, config: Config, flow: Flow, ranks: DataParallel | None = None, training: bool = True
) -> TrainingBackend:
    """Create the role's backend, with a scalar head for values or scores, and with an optimizer if the flow trains it.

    Without `training` it is a frozen copy that receives its weights.
    """
    trained = role in flow.trained_roles
    spec = BackendSpec(
        role, config, training and trained, role in flow.scalar_roles, trained and not training, ranks or DataParallel()
    )
    worker: TrainingBackend = BACKENDS.find(settings_of(role, config).backend)(spec)
    return worker


def torch_backend(spec: BackendSpec) -> RoleWorker:
    """Create the built-in backend."""
    return RoleWorker(spec.role, spec.config, spec.train, spec.ranks, spec.is_copy, spec.is_scalar)


def torch_worker(worker: TrainingBackend) -> RoleWorker:
    """Return the worker as a `RoleWorker`; only the built-in backend supports offloading, sharded generation and copies."""
    assert isinstance(worker, RoleWorker), f"check_backends lets {worker.role} have no other here"
    return worker


def copy_within(worker: ShardedBackend, target: Parts, divided: bool, limit_bytes: int = LIMIT_BYTES) -> LayoutCopy:
    """Plan a copy of a worker's weights on its own ranks; `divided`: the second model is sharded."""
    # If each rank holds both models in full, no communication is needed.
    meet = worker.ranks if worker.ranks.is_sharded or divided else DataParallel()
    return LayoutCopy(worker.weights, target, meet, limit_bytes)


class RoleCopy:
    """A worker without an optimizer that takes another worker's weights on the same ranks; their layouts may differ."""

    def __init__(self, worker: RoleWorker, source: RoleWorker) -> None:
        """Plan the transfer. Raises UserError if shapes differ or the worker has an optimizer."""
        check_copies(worker, source.role, source.base_shapes)
        self.worker, self.source = worker, source
        self.copy = copy_within(source, worker.weights, worker.ranks.is_sharded)
        self._weight_updates = source.weight_updates

    def refresh(self) -> TransferVolume | None:
        """Copy the source's weights if they have changed, else return None; all ranks call this at the same time."""
        if self._weight_updates == self.source.weight_updates:
            return None
        self._weight_updates = self.source.weight_updates
        return self.copy.refresh()

    def move(self, decay: float) -> None:
        """Set weights to decay · own + (1 - decay) · source; all ranks call this at the same time."""
        self.worker.weight_updates += 1
        self.copy.refresh(keep=decay)


def copied_parts(worker: RoleWorker, source: str, decay: float) -> Mapping[str, WeightPart]:
    """Return the worker's parts as targets of an EMA copy: decay · own + (1 - decay) · the weights of the role `source`.

    Raises UserError if the worker has an optimizer.
    """
    check_copies(worker, source, worker.base_shapes)
    worker.weight_updates += 1
    return {name: replace(part, kept=decay) for name, part in worker.weights().items()}


def check_copies(worker: RoleWorker, source: str, shapes: Mapping[str, torch.Size]) -> None:
    """Raise UserError if the worker is trained by a loss, or its weights have other shapes."""
    if worker.optimizer is not None:
        raise UserError(f"{worker.role} is trained by a loss: it cannot take weights from {source} too")
    if worker.base_shapes != shapes:
        raise UserError(f"{worker.role} cannot take weights from {source}: {worker.path} is another model")
