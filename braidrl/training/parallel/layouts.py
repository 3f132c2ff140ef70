"""The layout of one role's ranks: the device mesh, and the data that each axis shards.

                    data 0                      data 1
            tensor 0    tensor 1        tensor 0    tensor 1
layers      all, or with pipeline > 1 those of its rank               `pipeline.split_layers`
rows        those of replica 0          those of replica 1            `gather_rows`
matrices    left half   right half      left half   right half        `tensor_parallel.parallelize_layer`
tokens      all, or with sequence or context > 1 a share              `predict_own_tokens`
            between matrices, half of these on each
shards      upper       upper           lower       lower             FSDP2, with shard=full or optimizer
experts     all, or with expert > 1 those of its index among neighbors       `experts.shard_experts`

The ranks of one replica compute the same rows: each contributes its own rows. In a layout with data parallelism alone,
each rank has a replica, and ranks exchange only gradients.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from braidrl.cluster.peers import Peers
from braidrl.cluster.process_groups import mesh_of, subgroup
from braidrl.cluster.world import Ranks
from braidrl.config.layout import AXES, ParallelLayout
from braidrl.data.codec import encode, unpack_rows
from braidrl.data.messages import join
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.training.compute.packed import OnPrediction, Packed, Predict
from braidrl.training.decoders.body import MOST_PASSES, body_of, non_text_parameters, plan_of_model
from braidrl.training.parallel import tensor as tensor_parallel
from braidrl.training.parallel.experts import (
    COPIES,
    EXPERT,
    check_experts,
    expert_blocks,
    experts_of,
    is_of_experts,
    shard_experts,
)
from braidrl.training.parallel.pipeline import Pipeline, is_tied, local_layers, split_layers
from braidrl.training.parallel.sequence import TokenGroups, predict_own_tokens
from braidrl.weights.boxes import Box
from braidrl.weights.shards import NamedTensor, by_tensor

BUCKET_BYTES = 64 << 20
"""Bytes of gradients in one all-reduce."""
ReadParameters = Callable[[nn.Module], None]
"""Reads the parameters of a module that are still on the meta device."""


@dataclass(frozen=True)
class DataParallel(Ranks):
    """The ranks of one role in their layout, which `apply_layout` makes; without one, each rank has a full replica."""

    is_reporting_rank: bool = True
    """True if this rank reports its replica's losses and metrics; one rank per replica does."""
    is_first_of_stage: bool = True
    """True if this rank reports the metrics of its pipeline stage's layers; one rank per stage of a replica does."""
    forward_is_collective: bool = False
    """True if a rank without rows must still join the forward passes of the others."""
    has_predictions: bool = True
    """True if this rank holds the model's last layer and computes predictions."""
    is_sharded: bool = False
    """True if no rank holds the full model."""
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    mesh: DeviceMesh | None = None
    """Mesh with dimensions (pipeline, node, shard, tensor); ranks along `node` and `shard` have different tokens.

    None for replicas.
    """
    token_mesh: DeviceMesh | None = None
    """Mesh with dimensions (pipeline, node, tokens), where `tokens` are `shard` and `tensor`; None without tensor
    parallelism.
    """
    expert_mesh: DeviceMesh | None = None
    """Mesh with dimensions (pipeline, node, copies, expert): ranks along `copies` have the same experts; None without
    expert parallelism.
    """
    replica_group: dist.ProcessGroup | None = None
    """All ranks of this replica."""
    token_groups: TokenGroups | None = None
    """The ranks of this replica that shard its tokens."""
    pipeline: Pipeline | None = None
    """The pipeline ranks of this replica; None without pipeline parallelism."""
    tied_embedding: list[Tensor] = field(default_factory=list)
    """The parameter that the first and the last pipeline rank share, if any."""
    partial_gradients: list[Tensor] = field(default_factory=list)
    """Parameters replicated along `tensor` whose local gradient is a partial sum."""
    uses_fsdp: bool = False
    """True if FSDP2 shards the model, so that ranks with different rows join collectives in every micro-batch."""

    def parallelize(self, model: Any, predict: Predict, read_parameters: ReadParameters) -> Predict:
        """Shard a model in place, which may be on the meta device until `read_parameters`; return the function to call
        for `predict`.
        """
        if self.mesh is None:
            read_parameters(model)
            return predict
        tied = is_tied(model)
        if self.pipeline is not None:
            split_layers(model, self.pipeline.group.rank(), self.pipeline.group.size())
        plan = tensor_parallel.plan_of(model) if self.layout.tensor > 1 else None
        if (multiple := self.layout.token_ranks * self.layout.tensor) > 1 and self.token_groups is not None:
            predict = partial(predict_own_tokens, predict, self.token_groups, multiple)
        # With several nodes, each has all shards.
        nodes = ("node",) if self.layout.nodes > 1 else ()
        rows_mesh = tokens_mesh = self.mesh[(*nodes, "shard")]
        if plan:
            # The ranks that compute different tokens: the tensor ranks, and with FSDP also ranks with other rows.
            assert self.token_mesh is not None
            tokens_mesh = self.token_mesh[(*nodes, "tokens")] if self.uses_fsdp else self.mesh["tensor"]
        experts = self.expert_mesh
        if experts is not None:
            setattr(model, MOST_PASSES, partial(self.most_of, what="the number of forward passes"))
        # Layer by layer, so that a rank never holds more than one full layer.
        for layer in local_layers(model):
            read_parameters(layer)
            for module in shard_experts(layer, experts[EXPERT]) if experts is not None else ():
                if self.uses_fsdp and experts is not None:
                    self._shard(module, experts[(*nodes, COPIES)])
            if plan:
                blocks = tensor_parallel.blocks_of(layer, plan, plan_of_model(model).mixers)
                tensor_parallel.parallelize_layer(
                    layer, blocks, self.mesh["tensor"], partial(self._shard, mesh=tokens_mesh)
                )
            if self.uses_fsdp:
                self._shard(layer, rows_mesh)
        read_parameters(model)
        if plan:
            tensor_parallel.parallelize_rest(model, self.mesh["tensor"])
        if self.uses_fsdp:
            self._shard(model, rows_mesh)
        for parameter in (*body_of(model).decoder.parameters(), *non_text_parameters(model)) if plan else ():
            # The gradient of a replicated parameter is a partial sum, over this rank's tokens or heads.
            axes = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
            if not {"tensor", "tokens", EXPERT} & {*(axes or ())}:
                self.partial_gradients.append(parameter)
        if self.uses_fsdp:
            # `predict` uses the output layer's weight without its forward: register it as a forward method of the
            # model.
            model.predict = predict
            register_fsdp_forward_method(model, "predict")
            predict = model.predict
        if tied and self.pipeline is not None and self.pipeline.embedding_group is not None:
            self.tied_embedding.append(model.get_input_embeddings().weight)
        return predict

    def expert_boxes(self, model: nn.Module) -> dict[str, Box]:
        """Return the block of each stack of experts that this rank reads, by its name in the full model."""
        if self.expert_mesh is None:
            return {}
        mesh = self.expert_mesh[EXPERT]
        if not (modules := experts_of(model)):
            raise UserError(
                f"trainer.layout: expert={mesh.size()}: the experts of {type(model).__name__} are no stacked matrices; "
                "write expert=1"
            )
        for module in modules:
            check_experts(module.num_experts, mesh.size())
        return expert_blocks(model, mesh.get_local_rank(), mesh.size())

    def _shard(self, module: Any, mesh: DeviceMesh) -> None:
        # Gradients are reduced in float32 for any weight dtype; loss sums are divided once, at `step`.
        dtype = next(module.parameters()).dtype
        policy = MixedPrecisionPolicy(reduce_dtype=torch.promote_types(dtype, torch.float32))
        keep = self.layout.shard == "optimizer"
        # Without `shard` ranks hold their experts in full even if tensor ranks shard the block around them.
        experts = set() if self.uses_fsdp else {p for p in module.parameters() if is_of_experts(p)}
        fully_shard(module, mesh=mesh, reshard_after_forward=not keep, mp_policy=policy, ignored_params=experts)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        module.set_reshard_after_backward(not keep, recurse=False)

    def reshard(self, model: Any) -> None:
        """Free parameters that were gathered for a forward pass, so that each rank holds only its local shards."""
        for module in model.modules():
            if isinstance(module, FSDPModule):  # the modules that FSDP gathers as units
                module.reshard()

    def gather_rows(self, rows: Rows) -> tuple[Rows, slice]:
        """Gather the rows of all ranks of this replica; return them and the slice of this rank's rows."""
        if self.layout.ranks_per_replica == 1:
            return rows, slice(0, len(rows))
        assert self.replica_group is not None
        with self.meeting("rows of one replica"):
            parts = [unpack_rows(part) for part in Peers(self.replica_group).all_gather(join(encode(rows)), 0)]
        before = sum(len(part) for part in parts[: self.replica_group.rank()])
        filled = [part for part in parts if len(part)]
        return Rows.cat(filled) if filled else rows, slice(before, before + len(rows))

    def num_micro_batches(self, micro_batches: int) -> int:
        """Return the number of micro-batches to run, equal on all ranks; a rank adds empty ones up to it."""
        if self.uses_fsdp or self.expert_mesh is not None:
            micro_batches = self.most_of(micro_batches, "the number of micro-batches")
        # Torch's schedule needs at least one per pipeline rank.
        return max(micro_batches, self.layout.pipeline) if micro_batches else 0

    def most_of(self, count: int, what: str) -> int:
        """Return the largest count of all ranks; `what` names it if a rank is missing."""
        return int(self.largest_of(torch.tensor(count), what))

    def largest_of(self, counts: Tensor, what: str) -> Tensor:
        """Replace each count by the largest one of all ranks, in place; `what` names them if a rank is missing."""
        with self.meeting(what):
            dist.all_reduce(counts, dist.ReduceOp.MAX, group=self.group)
        return counts

    def run_micro_batches(
        self, model: Any, compute: Predict, micro_batches: Sequence[Packed], on_prediction: OnPrediction
    ) -> None:
        """Compute each micro-batch, call `on_prediction` on the rank with predictions, and run its loss backward."""
        if self.pipeline is not None:
            self.pipeline.run_micro_batches(model, compute, micro_batches, on_prediction)
            return
        for number, packed in enumerate(micro_batches):
            loss = on_prediction(number, compute(packed))
            if loss is not None:
                loss.backward()

    def broadcast_predictions(self, values: Tensor) -> Tensor:
        """Broadcast values from the rank with predictions; other ranks pass a buffer of the same shape and dtype."""
        if self.pipeline is not None:
            dist.broadcast(values, group_src=self.pipeline.group.size() - 1, group=self.pipeline.group)
        return values

    def sum_of_stages(self, values: Tensor) -> Tensor:
        """Return the sum over the pipeline ranks; each rank's values are 0 for the layers of other ranks."""
        if self.pipeline is not None:
            dist.all_reduce(values, group=self.pipeline.group)
        return values

    def full_tensors(
        self, named: Mapping[str, NamedTensor], materialize: Callable[[NamedTensor], Tensor]
    ) -> Iterator[tuple[list[str], Tensor]]:
        """Yield each tensor of the model with its names; `materialize` builds it from its local form.

        All ranks of a sharded model call this at the same time. Each pipeline rank broadcasts its tensors; tied tensors
        may appear twice.
        """
        if self.pipeline is None:
            for names, tensor in by_tensor(named):
                yield names, materialize(tensor)
            return
        group = self.pipeline.group
        local: list[tuple[list[str], Any]] = by_tensor(named)
        about = [(names, list(held.shape), str(held.dtype).removeprefix("torch.")) for names, held in local]
        for rank, described in enumerate(Ranks(group).all_gather("tensors", about)):
            for number, (names, shape, dtype) in enumerate(described):
                if rank == group.rank():
                    sent = materialize(local[number][1])
                else:
                    sent = torch.empty(shape, dtype=getattr(torch, dtype), device=self.pipeline.device)
                dist.broadcast(sent, group_src=rank, group=group)
                yield names, sent

    def all_reduce_gradients(self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Replace each parameter's gradient by its sum over all ranks; every rank passes tensors of the same shapes."""
        if self.size == 1:
            return
        with self.meeting("all-reduce of gradients"):
            if not self.uses_fsdp:
                placed = [(t, is_of_experts(p)) for t, p in zip(tensors, parameters, strict=True)]
                group = self.group if self.mesh is None else self.mesh["shard"].get_group()
                sum_in_buckets([tensor for tensor, of_experts in placed if not of_experts], group)
                if self.expert_mesh is not None:
                    copies = self.expert_mesh[COPIES].get_group()
                    sum_in_buckets([tensor for tensor, of_experts in placed if of_experts], copies)
            for members, group in (
                (self.partial_gradients, self.mesh["tensor"].get_group() if self.mesh is not None else None),
                (self.tied_embedding, self.pipeline.embedding_group if self.pipeline is not None else None),
            ):
                numbers = {id(parameter) for parameter in members}
                shared = [t for t, parameter in zip(tensors, parameters, strict=True) if id(parameter) in numbers]
                if shared:
                    sum_in_buckets(shared, group)

    def gradient_norm(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
        """Return the global 2-norm of the gradients; some may be None.

        Each rank weights its squares so that every element counts once.
        """
        if self.mesh is None:
            return torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
        squares = torch.zeros((), dtype=torch.float64)
        for gradient, parameter in zip(gradients, parameters, strict=True):
            if gradient is not None:
                twice = any(parameter is tied for tied in self.tied_embedding)
                copies = self.size // self.layout.pipeline * (2 if twice else 1)
                shards = 1
                if isinstance(parameter, DTensor):
                    axes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
                    shards = math.prod(size for size, placement in axes if not placement.is_replicate())
                squares = squares.to(gradient.device) + gradient.double().square().sum() * shards / copies
        squares = squares.cpu()
        with self.meeting("the norm of gradients"):
            dist.all_reduce(squares, group=self.group)
        return squares.sqrt()


def apply_layout(layout: ParallelLayout, world: DataParallel, device: torch.device) -> DataParallel:
    """Return this rank's view of a layout; all ranks call this together.

    Raises UserError if it does not fit the number of ranks.
    """
    layout = layout.resolve(world.size)
    if layout.is_replicated:
        return world
    sizes = [getattr(layout, axis) for axis in AXES]
    grid = torch.arange(world.size).view(sizes)
    pools = grid.movedim(AXES.index("data"), 0).flatten(1)
    groups = [subgroup(groups_along(grid, axes)) for axes in (("context", "sequence"), ("sequence",), ("context",))]
    everyone, heads, context = groups
    assert everyone is not None and heads is not None and context is not None
    different = world.size // (layout.pipeline * layout.nodes * layout.tensor)
    shape = (layout.pipeline, layout.nodes, different, layout.tensor)
    mesh = mesh_of(device.type, shape, ("pipeline", "node", "shard", "tensor"))
    tokens = None
    if layout.tensor > 1:
        tokens = mesh_of(device.type, (*shape[:2], different * layout.tensor), ("pipeline", "node", "tokens"))
    experts = None
    if layout.expert > 1:
        sizes = [layout.pipeline, layout.nodes, different * layout.tensor // layout.expert, layout.expert]
        experts = mesh_of(device.type, tuple(sizes), ("pipeline", "node", COPIES, EXPERT))
    pipeline = None
    if layout.pipeline > 1:
        # Separate groups: a CUDA mesh's group may not support CPU tensors.
        pipeline_ranks, embedding_group = subgroup(grid.flatten(1).T), subgroup(grid[[0, -1]].flatten(1).T)
        assert pipeline_ranks is not None
        pipeline = Pipeline(pipeline_ranks, embedding_group, layout.token_ranks * layout.tensor, device)
    replica = subgroup(pools)
    assert replica is not None
    per_stage = layout.ranks_per_replica // layout.pipeline
    return DataParallel(
        world.own_group,
        world.supervisor,
        # The first rank of the replica's last pipeline stage.
        is_reporting_rank=replica.rank() == layout.ranks_per_replica - per_stage,
        is_first_of_stage=replica.rank() % per_stage == 0,
        forward_is_collective=True,
        has_predictions=pipeline is None or pipeline.group.rank() == layout.pipeline - 1,
        is_sharded=layout.tensor > 1 or layout.shard != "none" or pipeline is not None or experts is not None,
        layout=layout,
        mesh=mesh,
        token_mesh=tokens,
        expert_mesh=experts,
        replica_group=replica,
        token_groups=TokenGroups(everyone, heads, context),
        pipeline=pipeline,
        uses_fsdp=layout.shard != "none",
    )


def groups_along(grid: Tensor, axes: Sequence[str]) -> Tensor:
    """Return the ranks that differ in these axes alone, (groups, ranks), from a grid of ranks by AXES."""
    numbers = [AXES.index(axis) for axis in axes]
    last = grid.movedim(numbers, list(range(-len(numbers), 0)))
    return last.flatten(-len(numbers)).flatten(0, -2)


def sum_in_buckets(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """All-reduce tensors in place, consecutive ones of one dtype together in buckets of about BUCKET_BYTES."""
    buckets: list[list[Tensor]] = []
    for _, run in groupby(tensors, key=lambda tensor: tensor.dtype):
        size = BUCKET_BYTES
        for tensor in run:
            if size >= BUCKET_BYTES:
                buckets.append([])
                size = 0
            buckets[-1].append(tensor)
            size += tensor.nbytes
    for bucket in buckets:
        joined = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(joined, group=group)
        for tensor, part in zip(bucket, joined.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))
