"""A decoder of which each rank of a group has its slices: plain layers, and those between which the ranks meet.

    embedding ──sum──▶ [q k v ─▶ attend ─▶ o ──sum──▶ gate up ─▶ down ──sum──▶] × layers ─▶ norm ─▶ output ──side by side──▶ logits

All ranks compute the same rows, and what passes between layers is the same on all of them to the bit. For generation: no gradients.

Shapes: V vocabulary, D model width; `...` are rows and tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from transformers import PreTrainedModel

from braidrl.errors import UserError
from braidrl.models.cpu.linear import product
from braidrl.models.loading import is_unread, load_decoder
from braidrl.models.parallel.boxes import Box
from braidrl.models.parallel.slices import boxes_of, chunk, pattern_of
from braidrl.models.parallel.tensor import whole_plan_of
from braidrl.models.weight_files import Filling

KEY = "rollout.tensor"


class TensorRanks:
    """The ranks that divide a model, as one of them sees the others."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self.size = group, group.rank(), group.size()

    def summed(self, part: Tensor) -> Tensor:
        """The sum of every rank's part, the same bits on all of them.

        On a CPU they are added in the order of ranks, so that a row's sum does not depend on how many rows there are.
        """
        if part.device.type != "cpu":
            dist.all_reduce(part, group=self._group)
            return part
        first, *others = self._parts(part)
        total = first.to(torch.promote_types(part.dtype, torch.float32))
        for other in others:
            total += other
        return total.to(part.dtype)

    def joined(self, part: Tensor, width: int) -> Tensor:
        """Every rank's part (..., chunk of width) side by side, (..., width), on all of them."""
        each = -(-width // self.size)
        parts = self._parts(pad(part, (0, each - part.shape[-1])))
        return torch.cat(parts, -1)[..., :width].contiguous()

    def _parts(self, part: Tensor) -> list[Tensor]:
        part = part.contiguous()
        found = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(found, part, group=self._group)
        return found


class SummedLinear(nn.Linear):
    """A layer whose matrix is divided by its inputs; its bias is whole on each rank, and added once."""

    ranks: TensorRanks

    def forward(self, input: Tensor) -> Tensor:
        total = self.ranks.summed(product(input, self.weight))
        return total if self.bias is None else total + self.bias


class JoinedLinear(nn.Linear):
    """An output layer of which each rank computes the logits of its part of the vocabulary."""

    ranks: TensorRanks

    def forward(self, input: Tensor) -> Tensor:
        return self.ranks.joined(product(input, self.weight, self.bias), self.out_features)


class SummedEmbedding(nn.Embedding):
    """An embedding of which each rank knows its part of the vocabulary."""

    ranks: TensorRanks

    def forward(self, input: Tensor) -> Tensor:
        start, count = chunk(self.num_embeddings, self.ranks.rank, self.ranks.size)
        known = (input >= start) & (input < start + count)
        found = embedding((input - start).where(known, 0), self.weight)
        return self.ranks.summed(found.masked_fill(~known[..., None], 0.0))


MEETING: dict[str, type[nn.Module]] = {"rowwise": SummedLinear, "embedding_rowwise": SummedEmbedding}
"""What a module of a style becomes; others compute their slices alone."""


@dataclass(frozen=True)
class Slices:
    """Of each of a model's tensors, under each of its names: its whole shape, and the part that is here."""

    shapes: Mapping[str, torch.Size]
    boxes: Mapping[str, Box]


def load_divided(
    path: str | Path, dtype: torch.dtype, device: torch.device | str, ranks: TensorRanks
) -> tuple[PreTrainedModel, Slices]:
    """This rank's part of the decoder in a Hugging Face directory, of which it reads no more.

    Raises UserError as `load_decoder`, and for a model that has no plan or does not divide among so many.
    """
    model: Any = load_decoder(path, dtype, unread=True)
    check_heads(model.config.to_dict(), ranks.size)
    plan = whole_plan_of(model, KEY, f"{KEY}=1")
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    boxes = boxes_of(shapes, plan, ranks.rank, ranks.size)
    if is_unread(model):
        Filling(Path(path), model, boxes)(model)
    else:
        _keep(model, boxes)
    _meet(model, ranks, plan)
    _say_heads(model.config, ranks.size)
    return model.requires_grad_(False).eval().to(device), Slices(shapes, boxes)


def check_heads(settings: Mapping[str, Any], ranks: int) -> None:
    """Raises UserError where so many ranks do not divide the heads that a model's configuration names."""
    heads = settings.get("num_attention_heads", 1)
    for name, count in (("attention", heads), ("key/value", settings.get("num_key_value_heads", heads))):
        if count % ranks:
            raise UserError(
                f"{KEY}={ranks} does not divide the model's {count} {name} heads; write a number that divides {count}"
            )


def _keep(model: nn.Module, boxes: Mapping[str, Box]) -> None:
    """Leaves a whole model with this rank's parts; tied tensors stay tied."""
    kept: dict[nn.Parameter, nn.Parameter] = {}
    for name, whole in list(model.named_parameters(remove_duplicate=False)):
        if whole not in kept:
            kept[whole] = nn.Parameter(boxes[name].of(whole.detach()).clone())
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, kept[whole])


def _meet(model: Any, ranks: TensorRanks, plan: Mapping[str, str]) -> None:
    """Lets the ranks meet where a module's output needs every part."""
    output = model.get_output_embeddings()
    for name, module in model.named_modules():
        kind = JoinedLinear if module is output else MEETING.get(plan.get(pattern_of(name), ""))
        if kind is not None:
            module.__class__, module.ranks = kind, ranks


def _say_heads(config: Any, ranks: int) -> None:
    """The configuration of a divided model has the heads that a rank has: keys and values are kept for these."""
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.num_attention_heads //= ranks
    config.num_key_value_heads //= ranks
