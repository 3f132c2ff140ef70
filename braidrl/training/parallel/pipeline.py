"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass through the ranks (1F1B).

rank 0    embedding, layers 0..n          F0 F1    B0 F2    B1 F3    B2    B3
rank 1    layers n..2n, norm, head           F0 B0    F1 B1    F2 B2    F3 B3

The schedule is torch's. All messages of a run have one shape, so micro-batches are padded to the longest. The schedule allocates
buffers for all micro-batches, so a run has at most `RUN` of them per pipeline rank. A rank holds transformers' own model with
`PassThrough` in place of other ranks' layers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from braidrl.cluster.world import Ranks
from braidrl.training.compute.packed import Packed
from braidrl.training.decoders.body import RECEIVED, body_of
from braidrl.training.parallel.replicated import OnPrediction, Predict
from braidrl.weights.shards import by_tensor

RUN = 8
"""Most micro-batches per pipeline rank in one run: a trade-off of receive buffers against the pipeline bubble."""
HIDDEN = "hidden"
"""The key under which all pipeline ranks but the last return hidden states."""


class Pipeline:
    """The pipeline group of one replica of the model."""

    def __init__(
        self, group: dist.ProcessGroup, embedding_group: dist.ProcessGroup | None, divisor: int, device: torch.device
    ) -> None:
        """Describe the group.

        Args:
            group: The pipeline ranks.
            embedding_group: The first and the last rank, which share tied embedding weights; None on the others.
            divisor: The number of ranks that share the tokens of a micro-batch.
            device: The device of the model.
        """
        self.group, self.embedding_group, self.divisor, self.device = group, embedding_group, divisor, device
        self.rank, self.size = group.rank(), group.size()
        self.is_last = self.rank == self.size - 1

    def run_micro_batches(
        self, model: Any, compute: Predict, micro_batches: Sequence[Packed], on_prediction: OnPrediction
    ) -> None:
        """Run micro-batches as `DataParallel.run_micro_batches`; only the last pipeline rank calls `on_prediction`.

        All pipeline ranks call this at the same time with the same micro-batches, at least one per rank.
        """
        for numbers in runs(len(micro_batches), self.size):
            self._run(model, compute, micro_batches, on_prediction, numbers)

    def _run(
        self, model: Any, compute: Predict, micro_batches: Sequence[Packed], on_prediction: OnPrediction,
        numbers: Tensor,
    ) -> None:  # fmt: skip
        train = torch.is_grad_enabled()
        longest = max(len(micro_batches[number].input_ids) for number in numbers.tolist())
        own = -(-longest // self.divisor)

        def forward(number: int, hidden: Tensor | None) -> Tensor:
            packed = replace(micro_batches[number].padded(own * self.divisor), hidden=hidden)
            predicted = compute(packed)
            if not self.is_last:
                return predicted[HIDDEN]
            loss = on_prediction(number, predicted)
            return torch.zeros(()) if loss is None else loss

        message = torch.empty(1, own, model.config.hidden_size, dtype=model.dtype, device="meta", requires_grad=train)
        pipeline_stage = PipelineStage(
            RankModule(forward), self.rank, self.size, self.device,
            input_args=() if self.rank == 0 else (message,), output_args=(message,), group=self.group,
        )  # fmt: skip
        # The last pipeline rank outputs its loss; sums are divided once, at `step`.
        loss = (lambda output, number: output) if train else None
        schedule = Schedule1F1B(pipeline_stage, len(numbers), loss, scale_grads=False)
        try:
            schedule.step(number=numbers, target=numbers if train else None, return_outputs=False)
        except RuntimeError as error:
            # The schedule wraps errors; raise the original, so that lost peers and user errors are recognised.
            raise error.__cause__ or error from None

    def full_tensors(
        self, named: Mapping[str, Any], materialize: Callable[[Any], Tensor]
    ) -> Iterator[tuple[list[str], Tensor]]:
        """Yield tensors as `DataParallel.full_tensors`; each pipeline rank broadcasts its own. Tied tensors may appear twice."""
        own = by_tensor(named)
        about = [(names, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for names, tensor in own]
        for rank, described in enumerate(Ranks(self.group).all_gather("tensors", about)):
            for number, (names, shape, dtype) in enumerate(described):
                tensor = (
                    materialize(own[number][1])
                    if rank == self.rank
                    else torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                )
                dist.broadcast(tensor, group_src=rank, group=self.group)
                yield names, tensor

    def broadcast_predictions(self, values: Tensor) -> Tensor:
        """Broadcast the last pipeline rank's values; the other ranks pass a buffer of the same shape and dtype."""
        dist.broadcast(values, group_src=self.size - 1, group=self.group)
        return values


def runs(micro_batches: int, ranks: int) -> tuple[Tensor, ...]:
    """Split the micro-batch numbers into runs of about equal size, with at least one per pipeline rank if possible."""
    return torch.arange(micro_batches).tensor_split(-(-micro_batches // (RUN * ranks))) if micro_batches else ()


class RankModule(nn.Module):
    """The module that torch's schedule calls with a micro-batch's number and the previous pipeline rank's output."""

    def __init__(self, run: Callable[[int, Tensor | None], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, hidden: Tensor | None = None, *, number: Tensor) -> Tensor:
        return self.run(int(number), hidden)


class PassThrough(nn.Module):
    """A placeholder for a layer, norm, embedding or head of another pipeline rank."""

    def __init__(self, replaced: nn.Module | None = None) -> None:
        """Copy the plain attributes of the replaced layer, which the model's forward may read."""
        super().__init__()
        for name, value in vars(replaced).items() if replaced else ():
            if isinstance(value, str | int | float) and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class Nothing(nn.Module):
    """A placeholder for what only the first pipeline rank adds to the embedded tokens, such as learned positions."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(1)


class Received(PassThrough):
    """A placeholder for the layer before a pipeline rank's first, which returns the previous rank's output.

    It discards its input: the first rank has already processed the embedded tokens.
    """

    hidden: Tensor

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.hidden


def split_layers(model: Any, rank: int, ranks: int) -> None:
    """Keep one of `ranks` equal parts of a model's layers, in place; parameters keep their names."""
    body = body_of(model)
    each = len(body.layers) // ranks
    for number in range(len(body.layers)):
        if number // each != rank:
            before = number + 1 == rank * each
            body.layers[number] = kind = (Received if before else PassThrough)(body.layers[number])
            if before:
                setattr(model, RECEIVED, [kind])
    tied = is_tied(model)
    if rank < ranks - 1:
        body.norm = PassThrough()
        for name, child in list(model.named_children()):
            if child is not model.base_model:
                setattr(model, name, PassThrough())
    if rank > 0:
        for name, child in list(body.decoder.named_children()):
            if name == body.layers_name:
                break  # the modules after the layers belong to the last rank
            if name != body.embedding_name and any(True for _ in child.parameters()):
                setattr(body.decoder, name, Nothing())
    if rank > 0 and not (tied and rank == ranks - 1):
        body.embedding = PassThrough()


def is_tied(model: Any) -> bool:
    """Return whether embedding and output layer share their weight."""
    output, tokens = model.get_output_embeddings(), model.get_input_embeddings()
    return isinstance(output, nn.Linear) and isinstance(tokens, nn.Embedding) and output.weight is tokens.weight


def local_layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers that this rank holds."""
    return [layer for layer in body_of(model).layers if not isinstance(layer, PassThrough)]
