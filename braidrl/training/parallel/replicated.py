"""Data parallelism, and the interface of all layouts: each rank has a replica of the model, and ranks exchange only gradients."""

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
"""Called with a micro-batch's number and predictions; returns the loss for the backward pass, or None."""


@dataclass(frozen=True)
class DataParallel(Ranks):
    """The ranks of one role."""

    is_reporting_rank: bool = True
    """Whether this rank reports its replica's losses and metrics; one rank per replica does."""
    forward_is_collective: bool = False
    """Whether a rank without rows must still join the forward passes of the others."""
    has_predictions: bool = True
    """Whether this rank holds the model's last layer and computes predictions."""
    is_sharded: bool = False
    """Whether no rank holds the full model."""

    def parallelize(self, model: Any, predict: Predict, read_parameters: ReadParameters) -> Predict:
        """Shard a model in place.

        Args:
            model: A model whose parameters may still be on the meta device.
            predict: Computes the predictions of a packed micro-batch.
            read_parameters: Reads a module's parameters just before it is sharded.

        Returns:
            The function to call in place of `predict`.
        """
        read_parameters(model)
        return predict

    def reshard(self, model: Any) -> None:
        """Free parameters that were gathered for a forward pass, so that each rank holds only its local shards."""

    def gather_rows(self, rows: Rows) -> tuple[Rows, slice]:
        """Gather the rows of all ranks of this replica; return them and the slice of this rank's own rows."""
        return rows, slice(0, len(rows))

    def num_micro_batches(self, micro_batches: int) -> int:
        """Return the number of micro-batches to run, equal on all ranks; a rank pads its own with empty ones."""
        return micro_batches

    def run_micro_batches(
        self, model: Any, compute: Predict, micro_batches: Sequence[Packed], on_prediction: OnPrediction
    ) -> None:
        """Compute each micro-batch, call `on_prediction` on the rank with predictions, and run backward from the returned loss."""
        for number, packed in enumerate(micro_batches):
            loss = on_prediction(number, compute(packed))
            if loss is not None:
                loss.backward()

    def broadcast_predictions(self, values: Tensor) -> Tensor:
        """Broadcast values from the rank with predictions; other ranks pass a buffer of the same shape and dtype."""
        return values

    def full_tensors(
        self, named: Mapping[str, NamedTensor], materialize: Callable[[NamedTensor], Tensor]
    ) -> Iterator[tuple[list[str], Tensor]]:
        """Yield each tensor of the model with its names; `materialize` builds it from its local form.

        All ranks of a sharded model call this at the same time.
        """
        for names, tensor in by_tensor(named):
            yield names, materialize(tensor)

    def all_reduce_gradients(self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Replace each parameter's gradient by its sum over all ranks; every rank passes tensors of the same shapes."""
        if self.size > 1:
            with self.meeting("all-reduce of gradients"):
                sum_in_buckets(tensors, self.group)

    def gradient_norm(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
        """Return the global 2-norm of the gradients; some may be None."""
        return torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])


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
