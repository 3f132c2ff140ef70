"""Pipeline parallelism: each rank has some of the layers, and micro-batches pass through them one behind the other (1F1B).

rank 0    embedding, layers 0..n          F0 F1    B0 F2    B1 F3    B2    B3
rank 1    layers n..2n, norm, head           F0 B0    F1 B1    F2 B2    F3 B3

The schedule is torch's. Its messages within a run have one shape, so that micro-batches are filled up to the longest of them, and it
keeps buffers for all of them, so that a run has at most `RUN` for each pipeline rank. A rank holds transformers' own model in which the
layers of other ranks let everything pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from braidrl.models.compute.packed import Packed
from braidrl.models.parallel.messages import gathered
from braidrl.models.parallel.replicated import Predict, Then, by_tensor

RUN = 8
"""Micro-batches of one run of the schedule, for each pipeline rank: memory for its messages against time in which ranks wait."""
HIDDEN = "hidden"
"""Under which a pipeline rank that is not the last one returns what its layers made of the tokens."""


@dataclass(frozen=True)
class Pipeline:
    """The pipeline ranks of one copy of the model, of which this process is one."""

    group: dist.ProcessGroup
    ends: dist.ProcessGroup | None
    """The first and the last of them, which both have weights that embedding and output layer share; None on the others."""
    divisor: int
    """Ranks that divide the tokens of a micro-batch."""
    device: torch.device

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1

    def over(self, model: Any, compute: Predict, micro_batches: Sequence[Packed], then: Then) -> None:
        """As `DataParallel.over`, at least one micro-batch for each pipeline rank; `then` is called on the last pipeline rank alone.

        All ranks of the pipeline call this at the same time with the same micro-batches.
        """
        for numbers in runs(len(micro_batches), self.size):
            self._run(model, compute, micro_batches, then, numbers)

    def _run(self, model: Any, compute: Predict, micro_batches: Sequence[Packed], then: Then, numbers: Tensor) -> None:
        train = torch.is_grad_enabled()
        longest = max(len(micro_batches[number].input_ids) for number in numbers.tolist())
        own = -(-longest // self.divisor)

        def forward(number: int, hidden: Tensor | None) -> Tensor:
            packed = replace(micro_batches[number].padded(own * self.divisor), hidden=hidden)
            predicted = compute(packed)
            if not self.last:
                return predicted[HIDDEN]
            loss = then(number, predicted)
            return torch.zeros(()) if loss is None else loss

        message = torch.empty(1, own, model.config.hidden_size, dtype=model.dtype, device="meta", requires_grad=train)
        pipeline_stage = PipelineStage(
            RankModule(forward), self.rank, self.size, self.device,
            input_args=() if self.rank == 0 else (message,), output_args=(message,), group=self.group,
        )  # fmt: skip
        # The last pipeline rank's output is its loss; sums are divided once, at `step`.
        loss = (lambda output, number: output) if train else None
        schedule = Schedule1F1B(pipeline_stage, len(numbers), loss, scale_grads=False)
        try:
            schedule.step(number=numbers, target=numbers if train else None, return_outputs=False)
        except RuntimeError as error:
            # The schedule puts what a rank raises into words of its own, in which nobody finds a lost peer or a user's mistake.
            raise error.__cause__ or error from None

    def whole_tensors(
        self, named: Mapping[str, Any], whole: Callable[[Any], Tensor]
    ) -> Iterator[tuple[list[str], Tensor]]:
        """As `DataParallel.whole_tensors`: each pipeline rank sends its own. A name may come twice, with equal numbers."""
        own = by_tensor(named)
        about = [(names, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for names, tensor in own]
        of_all = [json.loads(bytes(part)) for part in gathered(bytearray(json.dumps(about).encode()), self.group)]
        for rank, described in enumerate(of_all):
            for number, (names, shape, dtype) in enumerate(described):
                tensor = (
                    whole(own[number][1])
                    if rank == self.rank
                    else torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                )
                dist.broadcast(tensor, group_src=rank, group=self.group)
                yield names, tensor

    def shared(self, values: Tensor) -> Tensor:
        """The last pipeline rank's values on every pipeline rank; the others bring a tensor of its shape and type."""
        dist.broadcast(values, group_src=self.size - 1, group=self.group)
        return values


def runs(micro_batches: int, ranks: int) -> tuple[Tensor, ...]:
    """Their numbers by run of the schedule: about as many in each, and at least one for each pipeline rank if there are so many."""
    return torch.arange(micro_batches).tensor_split(-(-micro_batches // (RUN * ranks))) if micro_batches else ()


class RankModule(nn.Module):
    """What torch's schedule calls for each micro-batch, by its number and what the pipeline rank before sent."""

    def __init__(self, run: Callable[[int, Tensor | None], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, hidden: Tensor | None = None, *, number: Tensor) -> Tensor:
        return self.run(int(number), hidden)


class Elsewhere(nn.Module):
    """A layer, norm, embedding or head that another pipeline rank has."""

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        return hidden


def cut(model: Any, rank: int, ranks: int) -> None:
    """Leaves a decoder or a scorer with the layers of one of `ranks` equal parts, in place; names stay those of the whole model."""
    body = model.base_model
    each = len(body.layers) // ranks
    for number in range(len(body.layers)):
        if number // each != rank:
            body.layers[number] = Elsewhere()
    head = next(name for name, child in model.named_children() if child is not body)
    tied = is_tied(model)
    if rank < ranks - 1:
        body.norm = Elsewhere()
        setattr(model, head, Elsewhere())
    if rank > 0 and not (tied and rank == ranks - 1):
        body.embed_tokens = Elsewhere()


def is_tied(model: Any) -> bool:
    """True where embedding and output layer have one weight."""
    output, tokens = model.get_output_embeddings(), model.get_input_embeddings()
    return isinstance(output, nn.Linear) and isinstance(tokens, nn.Embedding) and output.weight is tokens.weight


def own_layers(model: Any) -> list[nn.Module]:
    """The decoder layers that this rank has."""
    return [layer for layer in model.base_model.layers if not isinstance(layer, Elsewhere)]
