"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass through the ranks (1F1B).

rank 0    embedding, layers 0..n          F0 F1    B0 F2    B1 F3    B2    B3
rank 1    layers n..2n, norm, head           F0 B0    F1 B1    F2 B2    F3 B3

The schedule is torch's. All messages of a run have one shape, so micro-batches are padded to the longest. The schedule
allocates buffers for all micro-batches, so a run has at most `RUN` of them per pipeline rank. A rank holds
transformers' model with `PassThrough` in place of other ranks' layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from braidrl.errors import UserError
from braidrl.training.compute.packed import HIDDEN, OnPrediction, Packed, Predict
from braidrl.training.decoders.body import RECEIVED, base_of, body_of, non_text_modules

RUN = 8
"""Most micro-batches per pipeline rank in one run: a trade-off of receive buffers against the pipeline bubble."""


class WithLoss(torch.autograd.Function):
    """Hidden states for the next pipeline rank, with a loss of this rank's layers, whose gradient the backward adds."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)


@dataclass(frozen=True)
class Pipeline:
    """The pipeline group of one replica of the model."""

    group: dist.ProcessGroup
    embedding_group: dist.ProcessGroup | None
    """The first and the last rank, which share tied embedding weights; None on the others."""
    divisor: int
    """The number of ranks that share the tokens of a micro-batch."""
    device: torch.device

    def run_micro_batches(
        self, model: Any, compute: Predict, micro_batches: Sequence[Packed], on_prediction: OnPrediction
    ) -> None:
        """Run micro-batches as `DataParallel.run_micro_batches`.

        The last pipeline rank calls `on_prediction`, as does each rank that predicts more than hidden states. All
        pipeline ranks call this at the same time with the same micro-batches, at least one per rank.
        """
        rank, size, train = self.group.rank(), self.group.size(), torch.is_grad_enabled()

        def forward(tokens: int, hidden: Tensor | None = None, *, number: Tensor) -> Tensor:
            predicted = compute(replace(micro_batches[int(number)].padded(tokens), hidden=hidden))
            hidden = predicted.pop(HIDDEN, None)
            loss = on_prediction(int(number), predicted) if predicted else None
            if hidden is not None:
                return hidden if loss is None else WithLoss.apply(hidden, loss)
            return torch.zeros(()) if loss is None else loss.float()

        for numbers in runs(len(micro_batches), size):
            longest = max(len(micro_batches[number].input_ids) for number in numbers.tolist())
            tokens_of_rank = -(-longest // self.divisor)
            message = torch.empty(
                1,
                tokens_of_rank,
                model.config.get_text_config().hidden_size,
                dtype=model.dtype,
                device="meta",
                requires_grad=train,
            )
            # The last pipeline rank outputs its loss; sums are divided once, at `step`.
            output = message if rank < size - 1 else torch.empty((), device="meta", requires_grad=train)
            # The module that torch's schedule calls with a micro-batch's number and the previous pipeline rank's
            # output.
            module: Any = nn.Module()
            module.forward = partial(forward, tokens_of_rank * self.divisor)
            pipeline_stage = PipelineStage(
                module,
                rank,
                size,
                self.device,
                input_args=() if rank == 0 else (message,),
                output_args=(output,),
                group=self.group,
            )
            loss = (lambda output, number: output) if train else None
            schedule = Schedule1F1B(pipeline_stage, len(numbers), loss, scale_grads=False)
            try:
                schedule.step(number=numbers, target=numbers if train else None, return_outputs=False)
            except RuntimeError as error:
                # The schedule wraps errors; raise the original, so that lost peers and user errors are recognised.
                raise error.__cause__ or error from None


def runs(micro_batches: int, ranks: int) -> tuple[Tensor, ...]:
    """Split the micro-batch numbers into runs of about equal size, with at least one per pipeline rank if possible."""
    return torch.arange(micro_batches).tensor_split(-(-micro_batches // (RUN * ranks))) if micro_batches else ()


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


class EmptyModule(nn.Module):
    """A placeholder for modules that only the first pipeline rank has beside the embedding: positions, towers."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(1)


class Received(PassThrough):
    """A placeholder for the layer before a rank's first: it returns the previous rank's output as embeddings."""

    hidden: Tensor

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.hidden


def split_layers(model: Any, rank: int, ranks: int) -> None:
    """Keep one of `ranks` equal parts of a model's layers, in place; parameters keep their names."""
    body = body_of(model)
    embedding_name, layers_name = body.sharded_names()
    per_rank = len(body.layers) // ranks
    for number in range(len(body.layers)):
        if number // per_rank != rank:
            before = number + 1 == rank * per_rank
            body.layers[number] = kind = (Received if before else PassThrough)(body.layers[number])
            if before:
                setattr(model, RECEIVED, [kind])
    tied = is_tied(model)
    if rank < ranks - 1:
        if body.norm_name is None:
            raise UserError(
                f"trainer.layout.pipeline: {type(body.decoder).__name__} has no final norm; write pipeline=1"
            )
        setattr(body.decoder, body.norm_name, PassThrough())
        for name, child in list(model.named_children()):
            if child is not model.base_model:
                setattr(model, name, PassThrough())
    if rank > 0:
        for name in non_text_modules(model):
            setattr(base_of(model), name, EmptyModule())
        for name, child in list(body.decoder.named_children()):
            if name == layers_name:
                break  # the modules after the layers belong to the last rank
            if name != embedding_name and any(True for _ in child.parameters()):
                setattr(body.decoder, name, EmptyModule())
    if rank > 0 and not (tied and rank == ranks - 1):
        setattr(body.decoder, embedding_name, PassThrough())


def is_tied(model: Any) -> bool:
    """Return True if embedding and output layer share their weight."""
    output, tokens = model.get_output_embeddings(), model.get_input_embeddings()
    return isinstance(output, nn.Linear) and isinstance(tokens, nn.Embedding) and output.weight is tokens.weight


def local_layers(model: Any) -> list[nn.Module]:
    """Return this rank's decoder layers."""
    return [layer for layer in body_of(model).layers if not isinstance(layer, PassThrough)]
