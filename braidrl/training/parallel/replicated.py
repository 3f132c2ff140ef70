"""How the ranks of one role compute together. Here each has a replica of the model, and gradients are all they exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from braidrl.cluster.world import Ranks
from braidrl.data.rows import Rows
from braidrl.weights.shards import NamedTensor, by_tensor

if TYPE_CHECKING:
    from braidrl.training.compute.packed import Packed

BUCKET_BYTES = 64 << 20
"""Bytes of gradients in one all-reduce."""

Predict = Callable[..., dict[str, Tensor]]
ReadParameters = Callable[[nn.Module], None]
"""Reads the parameters of a module that are still on the meta device."""
OnPrediction = Callable[[int, dict[str, Tensor]], Tensor | None]
"""Called with a micro-batch's number and its predictions; returns the loss to go backward from, or None."""


@dataclass(frozen=True)
class DataParallel(Ranks):
    """The ranks of one role."""

    @property
    def is_reporting_rank(self) -> bool:
        """Return True for the one rank of a replica that adds its rows to losses and metrics."""
        return True

    @property
    def forward_is_collective(self) -> bool:
        """Return True where a rank without rows must still join the forward pass of the others."""
        return False

    @property
    def has_predictions(self) -> bool:
        """Return True where this rank holds the model's last layer, and so its predictions."""
        return True

    @property
    def is_sharded(self) -> bool:
        """Return True where no rank has the full model."""
        return False

    def parallelize(self, model: Any, predict: Predict, read_parameters: ReadParameters) -> Predict:
        """Shard a model in place.

        Args:
            model: A model whose parameters may still be on the meta device.
            predict: Computes the predictions of a packed micro-batch.
            read_parameters: Reads a module's parameters just before it is sharded.

        Returns:
            What to call in place of `predict` from then on.
        """
        read_parameters(model)
        return predict

    def reshard(self, model: Any) -> None:
        """Free the parameters that were gathered for a forward pass, so that each rank has its local shards only."""

    def gather_rows(self, rows: Rows) -> tuple[Rows, slice]:
        """Return the rows of all ranks that compute the same ones, and the slice of them that is this rank's own."""
        return rows, slice(0, len(rows))

    def num_micro_batches(self, micro_batches: int) -> int:
        """Return how many micro-batches this rank must run so that all run as many; those beyond its own are empty."""
        return micro_batches

    def run_micro_batches(
        self, model: Any, compute: Predict, micro_batches: Sequence[Packed], on_prediction: OnPrediction
    ) -> None:
        """Compute each micro-batch, call `on_prediction` where the predictions are, and go backward from the loss that it returns."""
        for number, packed in enumerate(micro_batches):
            loss = on_prediction(number, compute(packed))
            if loss is not None:
                loss.backward()

    def broadcast_predictions(self, values: Tensor) -> Tensor:
        """Broadcast values from the rank that has the predictions; the other ranks pass a buffer of the same shape and type."""
        return values

    def full_tensors(
        self, named: Mapping[str, NamedTensor], materialize: Callable[[NamedTensor], Tensor]
    ) -> Iterator[tuple[list[str], Tensor]]:
        """Yield each tensor of the model with its names, made by `materialize` from the local form.

        All ranks of a sharded model call this at the same time.
        """
        for names, tensor in by_tensor(named):
            yield names, materialize(tensor)

    def all_reduce_gradients(self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Replace each parameter's gradient by its sum over all rows. Every rank passes tensors of the same shapes."""
        if self.size > 1:
            with self.meeting("the sum of gradients"):
                sum_in_buckets(tensors, self.group)

    def gradient_norm(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of all parameters' gradients together; a gradient may be None."""
        return torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])


def sum_in_buckets(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """All-reduce tensors in place."""
    for bucket in buckets(tensors):
        joined = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(joined, group=group)
        for tensor, part in zip(bucket, joined.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group neighbours of one dtype into buckets of about BUCKET_BYTES."""
    found: list[list[Tensor]] = []
    for _, run in groupby(tensors, key=lambda tensor: tensor.dtype):
        size = BUCKET_BYTES
        for tensor in run:
            if size >= BUCKET_BYTES:
                found.append([])
                size = 0
            found[-1].append(tensor)
            size += tensor.nbytes
    return found
