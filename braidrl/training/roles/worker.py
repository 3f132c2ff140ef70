"""The built-in training backend: a rank's part of one role on plain torch, its micro-batches, and copies of its
weights.

folder ──read──▶ model ──adapters──▶ sharded ──▶ optimizer

rows ──plan──▶ micro-batches ─pack─▶ hidden states ─predict─▶ per action or row ─objective─▶ sums ─backward─▶ optim_step

tokens       p  p  p  a1 a2 a3
log_probs             l1 l2 l3       of each action, by an actor or a reference
values             v1 v2 v3          of the state before each action, by a critic, at the predicting position
score                     s          of the row, by a reward model, at its last token
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.process_groups import background_group
from braidrl.cluster.world import Ranks
from braidrl.config import Config
from braidrl.data.packing import Preferred, plan_micro_batches
from braidrl.data.rows import Rows
from braidrl.data.token_columns import ROUTED_EXPERTS
from braidrl.data.vision import IMAGE_TOKENS
from braidrl.errors import UserError
from braidrl.flow import Flow
from braidrl.native.malloc import keep_freed_memory
from braidrl.observe.metrics import Sums
from braidrl.training import lora
from braidrl.training.backends import Advance, BackendSpec, ShardedBackend, TrainingBackend
from braidrl.training.balance import RouterBalance, router_predictions
from braidrl.training.compute.attention import attends_compiled
from braidrl.training.compute.cpu_layers import compile_layers
from braidrl.training.compute.cuda_layers import use_kernels
from braidrl.training.compute.packed import HAS_ENTRIES, HIDDEN, Packed, pack, plan_shared, saves_enough
from braidrl.training.compute.rope_lengths import RopeLengths
from braidrl.training.decoders.body import (
    PACKED,
    checkpoint_activations,
    non_text_parameters,
    plan_of_model,
    run_body,
    set_training,
)
from braidrl.training.decoders.head import predicted_log_probs
from braidrl.training.decoders.images import ModelImages, images_of
from braidrl.training.decoders.routing import (
    Routing,
    experts_per_token,
    number_routers,
    routed,
    routes_dtype,
    use_routing,
)
from braidrl.training.loading import load_decoder, load_scorer
from braidrl.training.memory.offload import OffloadableTensors
from braidrl.training.names import BACKENDS
from braidrl.training.objective import Likelihood, Objective, nonfinite_tokens
from braidrl.training.optimizer import CONFIGURED, MASTER_BYTES, MasterOptimizer, StepOverrides
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.processors import load_vision
from braidrl.training.role_settings import merges_adapters, settings_of, sharing_base
from braidrl.training.roles import checkpoint
from braidrl.training.row_costs import image_token_cost, row_costs
from braidrl.weights.boxes import pattern_of
from braidrl.weights.checkpoint_files import HEAD, ParameterReader, WeightFiles, block_in, shapes_in
from braidrl.weights.file import ADAPTER as ADAPTER_WEIGHTS
from braidrl.weights.model_files import HubNames, ModelFiles
from braidrl.weights.shards import WeightPart, box_of, full_parts, local_shard, shapes_of, storages, weight_parts

OPTIMIZER_STATE = f"{checkpoint.OPTIMIZER}."
"""What the names of the optimizer's state among changing tensors begin with."""
FAST_LAYERS = {"cpu": compile_layers, "cuda": use_kernels}
"""Functions that switch a model to faster kernels, by device type."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch: its rows, their numbers in the batch, and their packing; an empty one has no rows."""

    numbers: list[int]
    rows: Rows
    packed: Packed


class RoleWorker(ShardedBackend):
    """The built-in backend, on torch: a rank's part of a role, which is a decoder or a scalar critic or reward model,
    trained or frozen.
    """

    def __init__(self, spec: BackendSpec) -> None:
        self.role, self.config = spec.role, spec.config
        self.path, self.dtype, self.device = spec.path, spec.dtype, spec.device
        self.train, self.is_copy, self.is_scalar = spec.train, spec.is_copy, spec.is_scalar
        self.weight_updates, self._nonfinite = 0, list[str]()
        self.trains_vision = settings_of(spec.role, spec.config).trains_vision
        keep_freed_memory()
        self.ranks, settings = spec.join(), settings_of(spec.role, spec.config)
        self.max_tokens, self.lora = settings.max_tokens, settings.lora if spec.is_adapted else None
        # A sharded model is read part by part, except with adapters, which are initialised on the full model.
        self.model = self.load_model(self.path, self.ranks.is_sharded and not self.lora)
        self.rope_lengths = RopeLengths.of(self.model.config)
        self.vision = load_vision(self.path, self.config.data.images)
        self.base_shapes = shapes_of(self.model)
        # Before adapters rename layers, and before ranks drop theirs.
        files = ModelFiles(self.path, self.model)
        self.left_out = {} if self.is_scalar else files.left_out
        """Tensors of the folder that the model lacks; checkpoints keep them."""
        if self.lora:
            lora.with_adapters(self.model, self.lora, self.config.seed)
            for module in list(self.model.modules()) if self.lora.base_dtype else ():
                if isinstance(base := getattr(module, "base_layer", None), nn.Linear):
                    module.base_layer = lora.FourBitLinear(base)
        self.shapes = shapes_of(self.model)
        if self.config.trainer.compile:
            FAST_LAYERS[self.device.type](self.model)
        balance = self.config.trainer.balance if self.train and not self.is_scalar else None
        self.balance = RouterBalance(self.model, balance, self.ranks) if balance is not None else None
        self.step_metrics: dict[str, float] = {}
        """Metrics of the last optimizer step by name."""
        # Before pipeline ranks drop layers.
        number_routers(self.model)
        # All pipeline ranks except the last forward hidden states.
        predict = self.predict if self.ranks.has_predictions else self.pass_on
        reader = ParameterReader(self.path, self.model, self.ranks.expert_boxes(self.model), files)
        self.compute = self.ranks.parallelize(self.model, predict, reader)
        # Only after sharding: the full model may be too large for one device.
        self.model.to(self.device).eval()
        for name, parameter in self.model.named_parameters():
            is_frozen = self.balance is not None and name in self.balance.frozen
            parameter.requires_grad_(self.train and not is_frozen and (not self.lora or lora.is_adapter(name)))
        for parameter in non_text_parameters(self.model) if not (self.config.trainer.train_vision or self.lora) else ():
            parameter.requires_grad_(False)
        self.optimizer: MasterOptimizer | None = None

        def local_parameters() -> list[Tensor]:
            self.ranks.reshard(self.model)
            return list(self.model.parameters())

        offloadable = {"weights": OffloadableTensors(local_parameters)}
        self.side_files: dict[str, bytes] | None = None
        """A checkpoint's files beside its weights, by name, written now so that no checkpoint fails on one."""
        self.background: dist.ProcessGroup | None = None
        """The process group for writing a checkpoint during training."""
        if self.train:
            parameters = dict(self.model.named_parameters())
            numbers_of = {name: number for number, name in enumerate(self.shapes)}
            rate, tower = (
                self.config.trainer.vision_learning_rate,
                {id(part) for part in non_text_parameters(self.model)},
            )
            rates = {name: rate for name, weight in parameters.items() if rate is not None and id(weight) in tower}
            self.optimizer = MasterOptimizer(
                parameters, self.config.trainer, spec.learning_rate, self.ranks, numbers_of, rates
            )
            offloadable["optimizer"] = OffloadableTensors(self.optimizer.tensors)
            if not self.lora:  # adapted layers have other names
                self.optimizer.read_masters(files)
            if settings.activation_checkpointing:
                checkpoint_activations(self.model)
            if not dist.is_initialized() or dist.get_rank() == 0:  # the rank that writes them
                self.side_files = checkpoint.side_files(self.model, self.path)
        self.offloadable = offloadable

    def load_model(self, folder: Path, on_meta: bool = False) -> Any:
        """Load this role's kind of model from a Hugging Face directory, on the CPU, or with parameters `on_meta`."""
        if self.is_scalar:
            return load_scorer(folder, self.dtype, fresh_head=self.train or self.is_copy, on_meta=on_meta)
        return load_decoder(folder, self.dtype, on_meta=on_meta)

    def routing(self, packed: Packed, is_watched: bool, records: bool = False) -> Routing | None:
        """Return the routing of a forward pass that replays, records or watches routes, otherwise None."""
        routes = packed.per_token.get(ROUTED_EXPERTS)
        mesh = self.ranks.mesh["tensor"] if self.ranks.mesh is not None and self.ranks.layout.tensor > 1 else None
        recording: dict[str, Any] = {"keeps_logits": is_watched, "tokens": len(packed.input_ids), "mesh": mesh}
        if routes is None or routes.dim() != 3:
            if records:
                use_routing(self.model)
            return Routing(**recording) if is_watched or records else None
        use_routing(self.model)
        return Routing(routes, packed.per_token[HAS_ENTRIES], **recording)

    def hidden_states(self, packed: Packed, routing: Routing | None = None) -> Tensor:
        """Return the output of this rank's last layer for each packed token, (N, D)."""
        with routed(routing):
            if packed.model_inputs and packed.hidden is None:
                hidden = self.images.run_packed(packed)[0]
            else:
                ids = packed.input_ids[None] if packed.hidden is None else None
                hidden = run_body(self.model, ids, packed.rope_positions, packed.attention(), packed.hidden)[0]
        if self.ranks.uses_fsdp and self.trains_vision and torch.is_grad_enabled():
            # FSDP reduces the gradients that a rank has: those of the tower are zero on a rank without images.
            tower = [parameter for parameter in non_text_parameters(self.model) if parameter.requires_grad]
            hidden = hidden + sum((0 * parameter.sum() for parameter in tower), hidden.new_zeros(()))
        return hidden

    def pass_on(
        self, packed: Packed, objective: Objective | Likelihood | None = None, records: bool = False
    ) -> dict[str, Tensor]:
        """Compute hidden states for the next pipeline rank, and the requested outputs of this rank's routers."""
        routing = self.routing(packed, objective is not None and self.balance is not None, records)
        hidden = self.hidden_states(packed, routing)[None]
        return {HIDDEN: hidden, **self.of_routers(routing, packed, records)}

    def of_routers(self, routing: Routing | None, packed: Packed, records: bool) -> dict[str, Tensor]:
        """Return the predictions that the balance of this rank's routers needs.

        If it `records`, also the experts (N, M, k) of all tokens, 0 for layers of other pipeline ranks.
        """
        outputs = router_predictions(routing, packed.predictors) if routing and routing.keeps_logits else {}
        if routing is not None and records:
            shape = len(packed.input_ids), number_routers(self.model), experts_per_token(self.model)
            outputs[ROUTED_EXPERTS] = torch.zeros(shape, dtype=torch.int64, device=self.device)
            if routing.chosen:
                outputs[ROUTED_EXPERTS][:, sorted(routing.chosen)] = routing.recorded()
        return outputs

    def predict(
        self, packed: Packed, objective: Objective | Likelihood | None = None, records: bool = False
    ) -> dict[str, Tensor]:
        """Compute the outputs that the loss needs, by name; without an objective, the outputs of inference, and if it
        `records` the experts of all tokens.

        A decoder gives `log_probs` and `entropy` of the A action tokens, (A,) float32 or float64 in nats at the run's
        temperature, a scalar model `values` (A,) and `scores` (B,), one per row.
        """
        routing = self.routing(packed, objective is not None and self.balance is not None, records)
        hidden = self.hidden_states(packed, routing)
        if not self.is_scalar:
            log_probs, entropy = predicted_log_probs(
                self.model,
                hidden[packed.predictors],
                packed.targets,
                self.config.rollout.temperature,
                with_entropy_grad=objective is not None and objective.entropy_coef != 0,
                compiled=self.config.trainer.compile,
            )
            return {"log_probs": log_probs, "entropy": entropy, **self.of_routers(routing, packed, records)}
        positions_of = {"values": packed.predictors, "scores": packed.row_ends}
        if objective is not None:
            positions_of = {name: positions for name, positions in positions_of.items() if name in objective.loss.reads}
        # At least float32: returns and margins need more precision than bfloat16.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        weight = self.model.score.weight.to(dtype)
        return {name: (hidden[positions].to(dtype) @ weight.T).squeeze(-1) for name, positions in positions_of.items()}

    @cached_property
    def images(self) -> ModelImages:
        """Return the model's encoded images. Raises UserError for a text-only model."""
        assert self.vision is not None, f"{self.role} takes no images"
        return images_of(self.model, self.vision, self.config.data.images.kept_mib, self.trains_vision)

    def shares_prompts(self, rows: Rows) -> bool:
        return (
            self.config.trainer.share_prompts
            and plan_of_model(self.model) == PACKED
            and not (self.vision is not None and self.vision.mutual)
            and saves_enough(rows, self.rope_lengths, compiled=attends_compiled(self.model))
        )

    def micro_batches(
        self, rows: Rows, whole_groups: bool = False, may_share: bool = True, trains: bool = False
    ) -> list[MicroBatch]:
        """Pack rows into micro-batches of at most `max_tokens`, and add empty ones up to the greatest number of any
        rank.

        With `whole_groups` a micro-batch holds complete groups. If rows `may_share`, each shared prompt is packed once.
        If the pass `trains`, the work on images counts a backward pass.
        """
        # Decided for all rows: a part that saves little by sharing would exceed its planned limit without it.
        plan, shares = list[list[int]](), may_share and self.shares_prompts(rows)
        price = image_token_cost(self.role, self.config, trains) if IMAGE_TOKENS in rows else 0.0
        if shares and not whole_groups:
            plan = plan_shared(rows, self.max_tokens, self.rope_lengths, price)
        elif len(rows):
            lengths, groups, preferred = rows["tokens"].lengths, rows["group"].tolist(), None
            if price:
                preferred = Preferred(row_costs(rows, lengths, price, together=True).tolist(), groups)
            whole = groups if whole_groups else None
            plan = plan_micro_batches(lengths.tolist(), self.max_tokens, rows.uids(), whole, preferred)
        batches = []
        for numbers in plan:
            part = rows.take(numbers)
            place_images = None if self.vision is None else self.images.place
            batches.append(MicroBatch(numbers, part, pack(part, self.device, shares, self.rope_lengths, place_images)))
        # A filler token without rows or actions, for a rank that only joins the collectives of a forward pass.
        none, filler_token = (torch.zeros(count, dtype=torch.int64, device=self.device) for count in (0, 1))
        tokens, offsets = {"input_ids": filler_token, "position_ids": filler_token}, torch.zeros(1, dtype=torch.int64)
        filler = Packed(tokens, (1,), none, none, offsets, none)
        return batches + [MicroBatch([], Rows({}), filler)] * (
            self.ranks.num_micro_batches(len(batches)) - len(batches)
        )

    def forward(self, name: str, rows: Rows, advance: Advance | None = None) -> Ragged:
        return self._forward(name, rows, advance)[0]

    def forward_with_routes(self, rows: Rows, advance: Advance | None = None) -> tuple[Ragged, Ragged]:
        """Return `log_probs`, and the experts (layers, k) of each token of a row except its last."""
        return self._forward("log_probs", rows, advance, records=True)

    @torch.no_grad()
    def _forward(self, name: str, rows: Rows, advance: Advance | None, records: bool = False) -> tuple[Ragged, Ragged]:
        """Return `forward`'s values, and with `records` the experts of all tokens but each row's last, else no rows."""
        rows, rows_of_rank = self.ranks.gather_rows(rows)
        batches = self.micro_batches(rows, may_share=not records)
        offsets = [torch.arange(len(b.rows) + 1) if name == "scores" else b.packed.offsets for b in batches]
        sizes = [int(starts[-1]) for starts in offsets]
        flat_values = torch.empty(sum(sizes), dtype=torch.promote_types(self.dtype, torch.float32))
        routes: dict[int, Tensor] = {}

        def keep(number: int, predicted: dict[str, Tensor]) -> None:
            batch = batches[number]
            if not batch.numbers:
                return
            if ROUTED_EXPERTS in predicted:  # also those of padding
                routes[number] = predicted[ROUTED_EXPERTS][: len(batch.packed.input_ids)]
            if name in predicted:
                flat_values.split(sizes)[number].copy_(predicted[name])
            if advance and self.ranks.is_reporting_rank:
                advance(len(batch.rows), len(batch.packed.input_ids))

        self.ranks.run_micro_batches(
            self.model,
            (lambda packed: self.compute(packed, None, True)) if records else self.compute,
            [batch.packed for batch in batches],
            keep,
        )
        none = Ragged(torch.empty(0), torch.zeros(1, dtype=torch.int64))
        if not len(rows):
            return none, none
        parts = self.ranks.broadcast_predictions(flat_values).split(sizes)
        order = torch.tensor([number for batch in batches for number in batch.numbers]).argsort()[rows_of_rank]
        values = Ragged.cat([Ragged(*part) for part in zip(parts, offsets, strict=True)]).take(order)
        if not records:
            return values, none
        dtype = routes_dtype(self.model)
        of_batches = [
            Ragged(self.ranks.sum_of_stages(routes[number]).to("cpu", dtype), batch.rows["tokens"].offsets)
            for number, batch in enumerate(batches)
            if batch.numbers
        ]
        every = Ragged.cat(of_batches).take(order)
        is_last = torch.zeros(len(every.values), dtype=torch.bool)
        is_last[every.offsets[1:] - 1] = True
        return values, every.where(~is_last)

    def forward_backward(
        self, objective: Objective, rows: Rows, sums: Sums, advance: Advance | None = None
    ) -> dict[str, float]:
        assert self.optimizer is not None, f"{self.role} is not trained"
        totals: dict[str, float] = {}
        rows, _ = self.ranks.gather_rows(rows)
        set_training(self.model, True)
        terms: tuple[Objective | Likelihood, ...] = (objective, *objective.auxiliary)
        for term in terms:
            batches = self.micro_batches(term.select(rows) if len(rows) else rows, term.whole_groups, trains=True)
            self.optimizer.collect(term.denominator)

            def loss_of(
                number: int,
                predicted: dict[str, Tensor],
                term: Objective | Likelihood = term,
                batches: list[MicroBatch] = batches,
            ) -> Tensor | None:
                batch = batches[number]
                if not batch.numbers:
                    # A zero loss over every output, so that all ranks run the same collectives.
                    return sum((0 * values.sum() for values in predicted.values()), torch.zeros(()))
                offsets, metrics = batch.packed.offsets, dict[str, Tensor]()
                if self.balance is not None:
                    predicted, of_routers = self.balance.observe(predicted, offsets)
                    self.balance.report(sums, self.role, of_routers)
                if self.ranks.has_predictions:
                    losses, metrics = term.sums(batch.rows, offsets, predicted)
                else:
                    losses = term.router_sums(batch.rows, offsets, predicted) if isinstance(term, Objective) else {}
                loss = losses.get(term.denominator)
                if loss is not None and self.ranks.is_first_of_stage:
                    total = float(loss.detach())
                    totals[term.denominator] = totals.get(term.denominator, 0.0) + total
                    if not math.isfinite(total):
                        self._nonfinite.append(nonfinite_tokens(batch.rows, offsets, predicted))
                if self.ranks.is_reporting_rank:
                    sums.add_per_token(self.role, metrics)
                    if advance:
                        advance(len(batch.rows) if term is objective else 0, len(batch.packed.input_ids))
                return loss

            self.ranks.run_micro_batches(
                self.model,
                lambda packed, term=term: self.compute(packed, term),
                [batch.packed for batch in batches],
                loss_of,
            )
        set_training(self.model, False)
        return totals

    @property
    def shared_model(self) -> Any:
        """Return the model, with its adapters, if an engine of this process may share it, otherwise None."""
        return None if self.ranks.is_sharded or merges_adapters(self.lora, self.config) else self.model

    def full_state_dict(self, gather: bool = True) -> dict[str, Tensor]:
        """Return the full tensors of the model by name, with adapters merged and tied tensors under each of their
        names.

        All ranks of a sharded model call this at the same time. Gathered tensors go to host memory, so that a device
        holds one full tensor at a time. Ranks that call without `gather` get an empty dict.
        """
        self.ranks.reshard(self.model)
        named = lora.plain_names(self.model, self.model.state_dict(keep_vars=True))
        # True if the module's parameters are the role's full weights.
        is_full = self.lora is None and not self.ranks.is_sharded
        tensors: dict[str, Tensor] = {}
        for names, tensor in self.ranks.full_tensors(named, lora.merged):
            if gather:
                tensors |= dict.fromkeys(names, tensor if is_full else tensor.cpu())
        return tensors

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self.full_state_dict().items()

    def weights(self, adapters_alone: bool = False) -> Mapping[str, WeightPart]:
        """Return the local shards by name, adapters merged on demand; with `adapters_alone`, only trained parameters by
        peft's names.
        """
        self.ranks.reshard(self.model)
        if adapters_alone:
            return lora.adapter_parts(self.model)
        return weight_parts(lora.plain_names(self.model, self.model.state_dict(keep_vars=True)))

    def bytes_of(self, part: str) -> int:
        if part == "weights":
            return sum(storage.nbytes() for storage in storages(self.model.parameters()))
        return self.optimizer.bytes_in_use if self.optimizer is not None else 0

    def export(self, folder: Path, write: bool = True) -> None:
        for part in self.saving_tasks(folder, write):
            part()

    def saving_tasks(self, folder: Path, write: bool = True, copy: bool = False) -> list[checkpoint.Write]:
        """Return the calls that write model, tokenizer and optimizer into a new folder, in order.

        Every rank of a sharded model calls this, and writes its share of the files; otherwise one rank of the role
        does, which passes `write`. `copy` copies this rank's parts to host memory first, so that a thread can write
        while training continues. Raises UserError on every rank if a tensor holds infinity or NaN; such a checkpoint
        must not replace a usable one.
        """
        ranks = self.ranks if self.ranks.is_sharded else Ranks()
        if not (write or self.ranks.is_sharded):
            return []
        weights = self.weights()
        sets = {
            "model": HubNames(self.model, [name for part in weights.values() for name in part.names]).parts(weights)
        }
        sources = [source for sources in self.left_out.values() for source in sources]
        beside = ModelFiles(self.path, self.model).stored(sources) if sources else {}
        if sets["model"] is not None:
            sets["model"] |= full_parts(beside.items())
        if self.lora:
            sets[f"{lora.ADAPTER}/{Path(ADAPTER_WEIGHTS).stem}"] = dict(self.weights(adapters_alone=True))
        if self.optimizer is not None:
            sets[checkpoint.OPTIMIZER] = checkpoint.state_parts(self.optimizer)
        if self.balance is not None and (state_of_balance := self.balance.state()):
            sets[checkpoint.BALANCE] = full_parts(state_of_balance.items())
        non_finite = next(filter(None, (checkpoint.not_finite(parts or weights) for parts in sets.values())), "")
        if first := next(filter(None, ranks.all_gather("infinite or NaN weights", non_finite)), ""):
            raise UserError(
                f"{self.role}: {first} holds infinity or NaN and is not saved; resume from the last checkpoint, with "
                "a lower trainer.learning_rate or with trainer.max_grad_norm"
            )
        # transformers converts weights that need more than names and slices, from full tensors.
        full = {**self.full_state_dict(gather=write), **beside} if sets["model"] is None else {}
        written = {stem: parts for stem, parts in sets.items() if parts is not None}
        if copy:
            written = {stem: checkpoint.copied(parts) for stem, parts in written.items()}
            full = {name: tensor.to("cpu", copy=True) for name, tensor in full.items()}
            if self.ranks.is_sharded:
                # Threads of several roles communicate concurrently: each role needs its own process group.
                self.background = self.background or background_group()
                ranks = Ranks(self.background)
        return [partial(self._write, folder, written, full, ranks, write)]

    def _write(
        self,
        folder: Path,
        sets: Mapping[str, Mapping[str, WeightPart]],
        full: dict[str, Tensor],
        ranks: Ranks,
        write: bool,
    ) -> None:
        """Write this rank's share of each set of files; the rank with `write` also writes the files beside them."""
        digests = dict[str, Any]()
        for stem, parts in sets.items():
            path = folder / stem
            written = checkpoint.write_files(parts, ranks, path.parent, path.name, write)
            digests |= {str(Path(stem).parent / name): about for name, about in written.items()}
        if not write:
            return
        if full:
            checkpoint.save_weights(self.model, folder, full)
        if self.lora:
            has_head = any(name == lora.PREFIX + HEAD for name in sets[f"{lora.ADAPTER}/{Path(ADAPTER_WEIGHTS).stem}"])
            lora.peft_config(self.lora, self.path, has_head).save_pretrained(folder / lora.ADAPTER)
        if self.side_files is None:
            self.side_files = checkpoint.side_files(self.model, self.path)
        for name, content in self.side_files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        (folder / checkpoint.DIGESTS).write_text(json.dumps(digests))

    def changing_parts(self) -> dict[str, WeightPart]:
        """Return, by name, this rank's parts of all tensors that training changes: weights and optimizer state."""
        self.ranks.reshard(self.model)
        weights = dict(self.model.named_parameters()) if self.lora else self.model.state_dict(keep_vars=True)
        tensors = {f"model.{name}": t for name, t in (lora.adapters_of(weights) if self.lora else weights).items()}
        state = checkpoint.divided_state(self.optimizer) if self.optimizer is not None else {}
        tensors |= {OPTIMIZER_STATE + name: tensor for name, tensor in state.items()}
        return {name: WeightPart([name], tensor.detach()) for name, tensor in tensors.items()}

    def empty_parts(self, tensors: Mapping[str, WeightPart]) -> dict[str, WeightPart]:
        """Return uninitialised host memory for this rank's parts of `tensors`, which other layouts changed.

        Raises LookupError if state of this rank's parameters is missing.
        """
        owners = {name: part for name, part in self.changing_parts().items() if name.startswith("model.")}
        if self.optimizer is not None:
            prefix = OPTIMIZER_STATE
            state = {name.removeprefix(prefix): p.local for name, p in tensors.items() if name.startswith(prefix)}
            shapes = {key: tensor.shape for key, tensor in state.items()}
            for key in checkpoint.local_keys(self.optimizer, len(self.shapes), shapes):
                parameter = checkpoint.owner(self.optimizer, key, state[key])
                box = (parameter.shape, box_of(parameter))
                owners[prefix + key] = WeightPart([prefix + key], state[key], box)
        return {
            name: WeightPart([name], torch.empty(part.box.sizes, dtype=part.tensor.dtype), (part.shape, part.box))
            for name, part in owners.items()
        }

    @torch.no_grad()
    def restore(self, parts: Mapping[str, WeightPart]) -> None:
        """Restore `changing_parts`; gradients are dropped."""
        for name, part in self.changing_parts().items():
            if name.startswith("model."):
                part.local.copy_(parts[name].local)
        if self.optimizer is not None:
            prefix = OPTIMIZER_STATE
            state = {name.removeprefix(prefix): p.local for name, p in parts.items() if name.startswith(prefix)}
            self.optimizer.load_state(state)
        self._forget_past()

    def _forget_past(self) -> None:
        """Forget what belongs to the weights before they were replaced."""
        self.weight_updates += 1
        self._nonfinite.clear()
        if self.vision is not None:
            self.images.clear()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        self.ranks.reshard(self.model)
        if (folder / lora.ADAPTER).is_dir() != bool(self.lora):
            how, now = ("without", "remove it") if self.lora else ("with", "set it as it was")
            raise UserError(
                f"{folder} was trained {how} trainer.lora or roles.{self.role}.lora; {now} to go on from there"
            )
        # This rank's trained state, its global shapes over all ranks, and its saved counterpart.
        saved: Mapping[str, Tensor]
        kept, shapes = dict(self.model.named_parameters()), self.shapes
        if self.lora:
            kept, shapes = lora.adapters_of(kept), lora.adapters_of(shapes)
            saved = lora.read_adapters(folder / lora.ADAPTER / ADAPTER_WEIGHTS, shapes)
        elif not self.ranks.is_sharded:
            saved = dict(self.load_model(folder).named_parameters())
        else:
            # A pipeline rank lacks the buffers of other ranks' layers: match buffer names by pattern.
            files = ModelFiles(folder, self.model)
            buffers = {pattern_of(name) for name, _ in self.model.named_buffers()}
            saved = files.without({name for name in files if pattern_of(name) in buffers or name in self.left_out})
        try:
            if shapes != shapes_in(saved):
                raise LookupError("the parameters have other names or shapes")
            # Read before anything is overwritten: the file may be damaged.
            state = checkpoint.optimizer_state(self.optimizer, len(self.shapes), folder) if self.optimizer else {}
        except LookupError as error:
            raise UserError(
                f"{folder} holds another model than {self.path}; resume with the configuration it was made with"
            ) from error
        for name, parameter in kept.items():
            local_shard(parameter).copy_(block_in(saved, name, parameter))
        if self.balance is not None:
            self.balance.load(ModelFiles(folder, self.model), WeightFiles(folder, checkpoint.BALANCE))
        if self.optimizer is not None:
            self.optimizer.load_state(state)
            if self.dtype.itemsize < MASTER_BYTES and not any(key.endswith(".master") for key in state):
                masters: Mapping[str, Tensor] = saved if self.lora else ModelFiles(folder, self.model)
                names = {name: name for name, _ in self.model.named_parameters()}
                stored = {adapter: name for name, adapter in lora.adapters_of(names).items()} if self.lora else {}
                self.optimizer.read_masters(masters, stored)
        self._forget_past()

    def optim_step(
        self, denominators: Mapping[str, float], iteration: int, overrides: StepOverrides = CONFIGURED
    ) -> float | None:
        assert self.optimizer is not None, f"{self.role} is not trained"
        self.ranks.reshard(self.model)
        norm = self.optimizer.step(denominators, iteration, overrides)
        self.nonfinite, self._nonfinite = tuple(self._nonfinite), []
        is_updated = norm is not None and math.isfinite(norm)
        self.weight_updates += is_updated
        if self.balance is not None:
            self.step_metrics = self.balance.step(is_updated)
        return norm


def make_worker(
    role: str, config: Config, flow: Flow, ranks: DataParallel | None = None, training: bool = True
) -> TrainingBackend:
    """Create a role's backend, with an optimizer if the flow trains it; without `training` a frozen copy that receives
    its weights.
    """
    trained, is_scalar = role in flow.trained_roles, role in flow.scalar_roles
    shares = training and role in sharing_base(config, flow.stages)
    spec = BackendSpec(
        role, config, training and trained, ranks or DataParallel(), trained and not training, is_scalar, shares
    )
    worker: TrainingBackend = BACKENDS.make(settings_of(role, config).backend, spec)
    return worker


def torch_worker(worker: TrainingBackend) -> RoleWorker:
    """Return the worker as a `RoleWorker`; only the built-in backend can offload, generate sharded and copy."""
    assert isinstance(worker, RoleWorker), f"check_backends lets {worker.role} have no other here"
    return worker
