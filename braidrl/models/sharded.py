"""The ranks of a role that divide its model: the mesh they form, and what is divided along each of its axes.

                    data 0                      data 1
            tensor 0    tensor 1        tensor 0    tensor 1
rows        a pool of rows, the same    another pool                  `pooled`
matrices    left half   right half      left half   right half        `tensor_parallel.divide`
tokens      all, or with sequence > 1 a share of the pool's           `sequence_parallel.divided`
shards      upper       upper           lower       lower             FSDP2, with shard=full or optimizer

A pool is what the ranks of one copy of the model compute together: each brings the rows that it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from braidrl.models import tensor_parallel
from braidrl.models.data_parallel import DataParallel, Predict, sum_in_buckets
from braidrl.models.layout import AXES, ParallelLayout
from braidrl.models.parts import parts_of
from braidrl.models.sequence_parallel import divided


@dataclass(frozen=True)
class Sharded(DataParallel):
    """Ranks with a layout under which none has a model for itself. Made by `laid_out`."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    everyone: DataParallel = field(default_factory=DataParallel)
    mesh: DeviceMesh | None = None
    """(shard, tensor), by these names; ranks along `shard` have different tokens."""
    pool: dist.ProcessGroup | None = None
    """The ranks that compute the same rows."""
    neighbours: dist.ProcessGroup | None = None
    """Those of them that divide their tokens."""

    @property
    def speaks(self) -> bool:
        assert self.pool is not None
        return self.pool.rank() == 0

    @property
    def together(self) -> bool:
        return True

    @property
    def divided(self) -> bool:
        return self.layout.tensor > 1 or self.divides_weights

    def meeting(self, purpose: str) -> AbstractContextManager[object]:
        return self.everyone.meeting(purpose)

    @property
    def divides_weights(self) -> bool:
        """True where ranks with different rows must meet in every micro-batch."""
        return self.layout.shard != "none"

    def place(self, model: Any, predict: Predict) -> Predict:
        assert self.mesh is not None and self.neighbours is not None
        if self.layout.sequence > 1:
            predict = divided(predict, self.neighbours)
        if self.layout.tensor > 1:
            tensor_parallel.divide(model, self.mesh["tensor"])
        if not self.divides_weights:
            return predict
        # Gradients are summed in float32 whatever the weights are; loss sums are divided once, at `step`.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.promote_types(model.dtype, torch.float32))
        keep = self.layout.shard == "optimizer"
        for module in (*model.base_model.layers, model):
            fully_shard(module, mesh=self.mesh["shard"], reshard_after_forward=not keep, mp_policy=policy)
        for module in sharded_modules(model):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            module.set_reshard_after_backward(not keep, recurse=False)
        # The output layer's weight is used without the layer's forward: the whole prediction is one forward of the model.
        model.predict = predict
        register_fsdp_forward_method(model, "predict")
        call: Predict = model.predict
        return call

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
        if not self.divides_weights:
            return micro_batches
        most = torch.tensor(micro_batches)
        with self.meeting("the number of micro-batches"):
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return int(most)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        if not self.divides_weights:
            assert self.mesh is not None
            with self.meeting("the sum of gradients"):
                sum_in_buckets(tensors, self.mesh["shard"].get_group())

    def norm(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
        """From each rank's squares, so weighted that every element of a gradient counts once, wherever it is held."""
        squares = torch.zeros((), dtype=torch.float64)
        for gradient, parameter in zip(gradients, parameters, strict=True):
            if gradient is not None:
                squares += gradient.double().square().sum().cpu() * parts_of(parameter) / self.size
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
    pools = grid.movedim(AXES.index("data"), 0).flatten(1).tolist()
    neighbours = grid.movedim(AXES.index("sequence"), -1).flatten(0, -2).tolist()
    mesh = init_device_mesh(
        device.type, (everyone.size // layout.tensor, layout.tensor), mesh_dim_names=("shard", "tensor")
    )
    groups = [dist.new_subgroups_by_enumeration(ranks)[0] for ranks in (pools, neighbours)]
    return Sharded(everyone.group, layout, everyone, mesh, *groups)


def sharded_modules(model: Any) -> Iterator[FSDPModule]:
    """The modules whose weights are gathered together."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def gathered(message: bytearray, group: dist.ProcessGroup) -> list[memoryview]:
    """Every rank's bytes, in the order of the group."""
    size = torch.tensor([len(message)])
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: len(message)] = torch.frombuffer(message, dtype=torch.uint8)
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [part[: int(count)].numpy().data for part, count in zip(found, sizes, strict=True)]
