"""How the ranks of one role compute together. Here: each has a copy of the model, and all they say to each other are sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from braidrl.data.rows import Rows

if TYPE_CHECKING:
    from braidrl.models.compute.packed import Packed

BUCKET_BYTES = 64 << 20
"""Gradients that are summed in one message."""

Part = TypeVar("Part")
"""What a rank has of a tensor."""
Predict = Callable[..., dict[str, Tensor]]
Fill = Callable[[nn.Module], None]
"""Reads the weights of a module of the model."""
Then = Callable[[int, dict[str, Tensor]], Tensor | None]
"""Gets a micro-batch's number and what is predicted of it; the loss to go backward from, or None."""


@dataclass(frozen=True)
class DataParallel:
    """The ranks of one role. Without a process group there is one rank, and every sum is what it was."""

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def is_reporting_rank(self) -> bool:
        """True for the one rank that counts the rows of `pooled` in losses and metrics."""
        return True

    @property
    def together(self) -> bool:
        """True where a rank without rows takes part in what the others compute."""
        return False

    @property
    def predicts(self) -> bool:
        """True where this rank has the model's last layer, and what is predicted."""
        return True

    @property
    def divided(self) -> bool:
        """True where no rank has the whole model."""
        return False

    def meeting(self, purpose: str) -> AbstractContextManager[object]:
        """Around a collective; who supervises the ranks says here who was missing."""
        return nullcontext()

    def place(self, model: Any, predict: Predict, fill: Fill) -> Predict:
        """Divides a model among the ranks, in place, and returns what to call for `predict` then; `fill` reads what is yet unread."""
        fill(model)
        return predict

    def settle(self, model: Any) -> None:
        """Leaves each rank with its own part of the model alone, after others' parts were brought to it."""

    def pooled(self, rows: Rows) -> tuple[Rows, slice]:
        """The rows that this rank computes, and where its own are among them."""
        return rows, slice(0, len(rows))

    def rounds(self, micro_batches: int) -> int:
        """How many micro-batches this rank takes part in; what is over its own are empty ones."""
        return micro_batches

    def over(self, model: Any, compute: Predict, micro_batches: Sequence[Packed], then: Then) -> None:
        """Computes each micro-batch and calls `then` with what is predicted; goes backward from the loss that it returns.

        Where the ranks divide the layers, `then` is called on those that predict.
        """
        for number, packed in enumerate(micro_batches):
            loss = then(number, compute(packed))
            if loss is not None:
                loss.backward()

    def shared(self, values: Tensor) -> Tensor:
        """What a rank that predicts has found, on those that do not too: these bring a tensor of its shape and type."""
        return values

    def whole_tensors(
        self, named: Mapping[str, Part], whole: Callable[[Part], Tensor]
    ) -> Iterator[tuple[list[str], Tensor]]:
        """Each tensor of the model, made by `whole` from what the ranks have of it, with its names.

        All ranks that have divided the model call this at the same time.
        """
        for names, tensor in by_tensor(named):
            yield names, whole(tensor)

    def sum_(self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Replaces each parameter's gradient by its sum over all rows. Every rank must pass tensors of the same shapes."""
        if self.size > 1:
            with self.meeting("the sum of gradients"):
                sum_in_buckets(tensors, self.group)

    def norm(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
        """Of the gradients of all parameters together, each None where there is none."""
        return torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])


def by_tensor(named: Mapping[str, Part]) -> list[tuple[list[str], Part]]:
    """Tensors with all of their names, of which tied ones have several."""
    found: dict[int, tuple[list[str], Part]] = {}
    for name, tensor in named.items():
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def sum_in_buckets(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Replaces each tensor by its sum over the group."""
    for bucket in buckets(tensors):
        joined = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(joined, group=group)
        for tensor, part in zip(bucket, joined.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one dtype, cut where they pass BUCKET_BYTES."""
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
