"""The ranks of a role that divide its model: the mesh they form, and what is divided along each of its axes.

                    data 0                      data 1
            tensor 0    tensor 1        tensor 0    tensor 1
layers      all, or with pipeline > 1 those of its rank               `pipeline.cut`
rows        a pool of rows, the same    another pool                  `pooled`
matrices    left half   right half      left half   right half        `tensor_parallel.divide_layer`
tokens      all, or with sequence > 1 a share of the pool's           `sequence_parallel.divided`
            of those, between matrices, half each
shards      upper       upper           lower       lower             FSDP2, with shard=full or optimizer

A pool is what the ranks of one copy of the model compute together: each brings the rows that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from braidrl.data.codec import decode, encode
from braidrl.data.frames import join, split
from braidrl.data.rows import Rows
from braidrl.models.compute.packed import Packed
from braidrl.models.parallel import tensor as tensor_parallel
from braidrl.models.parallel.layout import AXES, ParallelLayout
from braidrl.models.parallel.messages import gathered
from braidrl.models.parallel.pipeline import Pipeline, cut, is_tied, own_layers
from braidrl.models.parallel.replicated import DataParallel, Fill, Part, Predict, Then, sum_in_buckets
from braidrl.models.parallel.sequence import divided
from braidrl.models.parallel.shards import parts_of


@dataclass(frozen=True)
class Sharded(DataParallel):
    """Ranks with a layout under which none has a model for itself. Made by `laid_out`."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    everyone: DataParallel = field(default_factory=DataParallel)
    mesh: DeviceMesh | None = None
    """(pipeline, node, shard, tensor), by these names; ranks along `node` and `shard` have different tokens."""
    pool: dist.ProcessGroup | None = None
    """The ranks that compute the same rows."""
    neighbours: dist.ProcessGroup | None = None
    """Those of them that divide their tokens."""
    pipeline: Pipeline | None = None
    """Those of them that have other layers; None where each has them all."""
    tied_embedding: list[Tensor] = field(default_factory=list)
    """The parameter that the first and the last pipeline rank both have, where there is one."""
    in_parts: list[Tensor] = field(default_factory=list)
    """Parameters that all ranks along `tensor` have, and each a part of the gradient of."""

    @property
    def is_reporting_rank(self) -> bool:
        assert self.pool is not None
        return self.pool.rank() == self.layout.replica - self.layout.replica // self.layout.pipeline

    @property
    def predicts(self) -> bool:
        return self.pipeline is None or self.pipeline.last

    @property
    def together(self) -> bool:
        return True

    @property
    def divided(self) -> bool:
        return self.layout.tensor > 1 or self.divides_weights or self.pipeline is not None

    def meeting(self, purpose: str) -> AbstractContextManager[object]:
        return self.everyone.meeting(purpose)

    @property
    def divides_weights(self) -> bool:
        """True where ranks with different rows must meet in every micro-batch."""
        return self.layout.shard != "none"

    def place(self, model: Any, predict: Predict, fill: Fill) -> Predict:
        assert self.mesh is not None and self.neighbours is not None
        tied = is_tied(model)
        if self.pipeline is not None:
            cut(model, self.pipeline.rank, self.pipeline.size)
        if self.layout.sequence > 1:
            predict = divided(predict, self.neighbours, self.predicts)
        plan = tensor_parallel.plan_of(model) if self.layout.tensor > 1 else None
        if plan:
            predict = tensor_parallel.evened(predict, self.layout.sequence * self.layout.tensor)
        # One layer after the other, so that a rank never has more than one whole.
        for layer in own_layers(model):
            fill(layer)
            if plan:
                tensor_parallel.divide_layer(layer, plan, self.mesh["tensor"])
            self._shard(layer)
        fill(model)
        if plan:
            tensor_parallel.divide_rest(model, plan, self.mesh["tensor"])
        self._shard(model)
        if plan:
            self.in_parts.extend(tensor_parallel.found_in_parts(model))
        if self.divides_weights:
            # The output layer's weight is used without the layer's forward: the whole prediction is one forward of the model.
            model.predict = predict
            register_fsdp_forward_method(model, "predict")
            predict = model.predict
        if tied and self.pipeline is not None and self.pipeline.ends is not None:
            self.tied_embedding.append(model.get_input_embeddings().weight)
        return predict

    def _shard(self, module: Any) -> None:
        assert self.mesh is not None
        if not self.divides_weights:
            return
        # Gradients are summed in float32 whatever the weights are; loss sums are divided once, at `step`.
        dtype = next(module.parameters()).dtype
        policy = MixedPrecisionPolicy(reduce_dtype=torch.promote_types(dtype, torch.float32))
        keep = self.layout.shard == "optimizer"
        mesh = self.mesh["node", "shard"] if self.layout.nodes > 1 else self.mesh["shard"]
        fully_shard(module, mesh=mesh, reshard_after_forward=not keep, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        module.set_reshard_after_backward(not keep, recurse=False)

    def settle(self, model: Any) -> None:
        for module in sharded_modules(model):
            module.reshard()

    def pooled(self, rows: Rows) -> tuple[Rows, slice]:
        if self.layout.replica == 1:
            return rows, slice(0, len(rows))
        assert self.pool is not None
        with self.meeting("rows of one copy of the model"):
            parts = [decode(split(part)) for part in gathered(join(encode(rows)), self.pool)]
        before = sum(len(part) for part in parts[: self.pool.rank()])
        filled = [part for part in parts if len(part)]
        return Rows.cat(filled) if filled else rows, slice(before, before + len(rows))

    def rounds(self, micro_batches: int) -> int:
        if self.divides_weights:
            most = torch.tensor(micro_batches)
            with self.meeting("the number of micro-batches"):
                dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            micro_batches = int(most)
        # Torch's schedule has at least one for each pipeline rank.
        return max(micro_batches, self.layout.pipeline) if micro_batches else 0

    def over(self, model: Any, compute: Predict, micro_batches: Sequence[Packed], then: Then) -> None:
        if self.pipeline is None:
            super().over(model, compute, micro_batches, then)
        else:
            self.pipeline.over(model, compute, micro_batches, then)

    def shared(self, values: Tensor) -> Tensor:
        return values if self.pipeline is None else self.pipeline.shared(values)

    def whole_tensors(
        self, named: Mapping[str, Part], whole: Callable[[Part], Tensor]
    ) -> Iterator[tuple[list[str], Tensor]]:
        if self.pipeline is None:
            yield from super().whole_tensors(named, whole)
        else:
            yield from self.pipeline.whole_tensors(named, whole)

    def sum_(self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        with self.meeting("the sum of gradients"):
            assert self.mesh is not None
            if not self.divides_weights:
                sum_in_buckets(tensors, self.mesh["shard"].get_group())
            if self.in_parts:
                sum_in_buckets(those(self.in_parts, tensors, parameters), self.mesh["tensor"].get_group())
            if self.tied_embedding:
                assert self.pipeline is not None
                sum_in_buckets(those(self.tied_embedding, tensors, parameters), self.pipeline.ends)

    def norm(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
        """From each rank's squares, so weighted that every element of a gradient counts once, wherever it is held."""
        squares = torch.zeros((), dtype=torch.float64)
        for gradient, parameter in zip(gradients, parameters, strict=True):
            if gradient is not None:
                held = (
                    self.size
                    // self.layout.pipeline
                    * (2 if those(self.tied_embedding, [gradient], [parameter]) else 1)
                )
                squares += gradient.double().square().sum().cpu() * parts_of(parameter) / held
        with self.meeting("the norm of gradients"):
            dist.all_reduce(squares, group=self.group)
        return squares.sqrt()


def laid_out(layout: ParallelLayout, everyone: DataParallel, device: torch.device) -> DataParallel:
    """The ranks with a layout over all of `everyone`, whose group is the world; each of them calls this at the same time.

    Raises UserError where the layout does not fit their number.
    """
    layout = layout.over(everyone.size)
    if layout.copies:
        return everyone
    sizes = [getattr(layout, axis) for axis in AXES]
    grid = torch.arange(everyone.size).view(sizes)
    pools = grid.movedim(AXES.index("data"), 0).flatten(1)
    neighbours = grid.movedim(AXES.index("sequence"), -1).flatten(0, -2)
    different = everyone.size // (layout.pipeline * layout.nodes * layout.tensor)
    shape = (layout.pipeline, layout.nodes, different, layout.tensor)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "node", "shard", "tensor"))
    pipeline = None
    if layout.pipeline > 1:
        # Groups of their own: that of a mesh on CUDA may have no way to send what lies on the host.
        pipeline_ranks, ends = subgroup(grid.flatten(1).T), subgroup(grid[[0, -1]].flatten(1).T)
        assert pipeline_ranks is not None
        pipeline = Pipeline(pipeline_ranks, ends, layout.sequence * layout.tensor, device)
    return Sharded(everyone.group, layout, everyone, mesh, subgroup(pools), subgroup(neighbours), pipeline)


def subgroup(ranks: Tensor) -> dist.ProcessGroup | None:
    """Of groups of ranks, one in each row, the one that this rank is in; None where it is in none."""
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return group


def those(known: Sequence[Tensor], tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Of tensors, one for each parameter, those of known parameters."""
    numbers = {id(parameter) for parameter in known}
    return [tensor for tensor, parameter in zip(tensors, parameters, strict=True) if id(parameter) in numbers]


def sharded_modules(model: Any) -> Iterator[FSDPModule]:
    """The modules whose weights are gathered together."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
