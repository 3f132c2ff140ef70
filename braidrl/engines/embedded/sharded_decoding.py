"""Sharded decoding: plain layers that compute their local slices, and layers with a collective.

    embedding ──all-reduce─▶ [q k v ─▶ attend ─▶ o ─all-reduce─▶ gate up ─▶ down ─all-reduce─▶] × layers ─▶ norm
        ─▶ output
    ──all-gather──▶ logits

A layer of experts is one more part with an all-reduce: each rank has some of them, and computes the rows that chose
them.

All ranks compute the same rows, with hidden states that are bitwise equal and without gradients. Each pipeline rank has
some of the layers, and the last one samples for all.

Shapes: V vocabulary, D model width; `...` are rows and tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from transformers import PreTrainedModel

from braidrl.cluster.process_groups import subgroup
from braidrl.errors import UserError
from braidrl.native.linear import product
from braidrl.training.compute.expert_forms import LocalExperts
from braidrl.training.compute.experts import experts_forward
from braidrl.training.decoders.body import RECEIVED, body_of
from braidrl.training.loading import load_decoder
from braidrl.training.parallel.experts import expert_blocks, experts_of
from braidrl.training.parallel.pipeline import PassThrough, split_layers
from braidrl.training.parallel.tensor import full_plan_of
from braidrl.weights.boxes import Slices, boxes_of, chunk, pattern_of
from braidrl.weights.checkpoint_files import ParameterReader
from braidrl.weights.model_files import ModelFiles

KEY = "rollout.tensor"


class TensorRanks:
    """This rank's view of the tensor-parallel group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self.size = group, group.rank(), group.size()

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of every rank's partial result, bitwise equal on all of them.

        On a CPU the parts are added in the order of ranks, so a row's sum does not depend on the number of rows.
        """
        if part.device.type != "cpu":
            dist.all_reduce(part, group=self._group)
            return part
        first, *further = self._gather(part)
        total = first.to(torch.promote_types(part.dtype, torch.float32))
        for addend in further:
            total += addend
        return total.to(part.dtype)

    def all_gather(self, part: Tensor, width: int) -> Tensor:
        """Gather every rank's chunk (..., chunk of width) along the last dimension, (..., width), on all ranks."""
        columns = -(-width // self.size)
        parts = self._gather(pad(part, (0, columns - part.shape[-1])))
        return torch.cat(parts, -1)[..., :width].contiguous()

    def _gather(self, part: Tensor) -> list[Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self._group)
        return parts


class ReceiveHidden(nn.Module):
    """A layer in place of the embedding that receives the hidden states of the previous layers."""

    def __init__(self, pipeline: dist.ProcessGroup, width: int, dtype: torch.dtype, received: Any) -> None:
        super().__init__()
        self.pipeline, self.width, self.dtype, self.received = pipeline, width, dtype, [received]

    def forward(self, input: Tensor) -> Tensor:
        hidden = torch.empty(*input.shape, self.width, dtype=self.dtype, device=input.device)
        dist.recv(hidden, group=self.pipeline, group_src=self.pipeline.rank() - 1)
        self.received[0].hidden = hidden
        return hidden


class SendHidden(nn.Module):
    """A layer in place of the last norm that sends the hidden states to the next layers."""

    def __init__(self, pipeline: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.pipeline, self.dtype = pipeline, dtype

    def forward(self, hidden: Tensor) -> Tensor:
        dist.send(hidden.to(self.dtype).contiguous(), group=self.pipeline, group_dst=self.pipeline.rank() + 1)
        return hidden


def join_generation_groups(groups: Tensor) -> tuple[TensorRanks, dist.ProcessGroup | None]:
    """Return this rank's tensor-parallel group, and its pipeline group, None if each rank has all layers; all ranks
    call this together.

    `groups` are the ranks of each generation group, (groups, pipeline, tensor), as `GenerationLayout.groups` returns
    them.
    """
    tensor = subgroup(groups.flatten(0, 1))
    assert tensor is not None, "every rank that generates is in a group"
    return TensorRanks(tensor), subgroup(groups.movedim(1, 2).flatten(0, 1)) if groups.shape[1] > 1 else None


class RowParallelLinear(nn.Linear):
    """A linear layer sharded along its inputs; every rank has the bias, which is added once."""

    ranks: TensorRanks

    def forward(self, input: Tensor) -> Tensor:
        total = self.ranks.all_reduce(product(input, self.weight))
        return total if self.bias is None else total + self.bias


class ParallelLMHead(nn.Linear):
    """An output layer sharded along the vocabulary, whose logits are gathered."""

    ranks: TensorRanks

    def forward(self, input: Tensor) -> Tensor:
        return self.ranks.all_gather(product(input, self.weight, self.bias), self.out_features)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding sharded along the vocabulary."""

    ranks: TensorRanks

    def forward(self, input: Tensor) -> Tensor:
        start, count = chunk(self.num_embeddings, self.ranks.rank, self.ranks.size)
        is_local = (input >= start) & (input < start + count)
        embedded = embedding((input - start).where(is_local, 0), self.weight)
        return self.ranks.all_reduce(embedded.masked_fill(~is_local[..., None], 0.0))


class ShareOfExperts:
    """The forward of a module that holds this rank's experts of a layer."""

    def __init__(self, module: Any, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self._start, self._count = chunk(module.num_experts, ranks.rank, ranks.size)
        self._experts = LocalExperts(module, self._count)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums (T, D) of all experts `top_k_index` (T, K) of tokens (T, D), on all ranks."""
        local = top_k_index - self._start
        tokens, choices = ((local >= 0) & (local < self._count)).nonzero(as_tuple=True)
        rows, weights = hidden_states[tokens], top_k_weights[tokens, choices, None]
        outputs = experts_forward(self._experts, rows, local[tokens, choices, None], weights)
        return self._ranks.all_reduce(torch.zeros_like(hidden_states).index_add_(0, tokens, outputs))


PARALLEL_MODULES: dict[str, type[nn.Module]] = {
    "rowwise": RowParallelLinear,
    "embedding_rowwise": VocabParallelEmbedding,
}
"""The module class of each style that needs a collective; other modules compute their slices alone."""


def load_for_decoding(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    ranks: TensorRanks,
    pipeline: dist.ProcessGroup | None = None,
) -> tuple[PreTrainedModel, Slices]:
    """Load this rank's layers and slices of the decoder in a Hugging Face directory, and read only these.

    Raises UserError as `load_decoder`, and for a model without a tensor-parallel plan or that cannot be sharded over
    this number of ranks.
    """
    model: Any = load_decoder(path, dtype, on_meta=True)
    config = model.config
    check_heads(config.to_dict(), ranks.size)
    plan = full_plan_of(model, KEY, f"{KEY}=1") if ranks.size > 1 else {}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    boxes = boxes_of(shapes, plan, ranks.rank, ranks.size) | expert_blocks(model, ranks.rank, ranks.size)
    if pipeline is not None:
        split_layers(model, pipeline.rank(), pipeline.size())
    if next(model.parameters()).is_meta:
        ParameterReader(Path(path), model, boxes, ModelFiles(Path(path), model))(model)
    else:
        # Keep this rank's slices of a full model's parameters; tied tensors stay tied.
        sliced: dict[nn.Parameter, nn.Parameter] = {}
        for name, full in list(model.named_parameters(remove_duplicate=False)):
            if full not in sliced:
                sliced[full] = nn.Parameter(boxes[name].of(full.detach()).clone())
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, sliced[full])
    if ranks.size > 1:
        output = model.get_output_embeddings()
        for name, module in model.named_modules():
            kind = ParallelLMHead if module is output else PARALLEL_MODULES.get(plan.get(pattern_of(name), ""))
            if kind is not None:
                module.__class__, module.ranks = kind, ranks
        for experts in experts_of(model):
            experts.forward = ShareOfExperts(experts, ranks)
        # One rank's number of heads, for which the key/value cache is made.
        config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        config.num_attention_heads //= ranks.size
        config.num_key_value_heads //= ranks.size
    if pipeline is not None:
        # Hidden states are received before this rank's layers, and sent after them.
        body = body_of(model)
        if pipeline.rank() > 0:
            before = getattr(model, RECEIVED)[0]
            received, embedding = ReceiveHidden(pipeline, config.hidden_size, model.dtype, before), body.embedding
            if not isinstance(embedding, PassThrough):
                # The output layer's weight, under its name on the first rank.
                received.weight = embedding.weight
            setattr(body.decoder, body.sharded_names()[0], received)
        if pipeline.rank() < pipeline.size() - 1:
            assert body.norm_name is not None, "split_layers refuses decoders without a norm"
            setattr(body.decoder, body.norm_name, SendHidden(pipeline, model.dtype))
    return model.requires_grad_(False).eval().to(device), Slices(shapes, boxes)


def check_heads(settings: Mapping[str, Any], ranks: int) -> None:
    """Raise UserError if the number of ranks does not divide the model's attention and key/value heads."""
    heads = settings.get("num_attention_heads", 1)
    for name, count in (("attention", heads), ("key/value", settings.get("num_key_value_heads", heads))):
        if count % ranks:
            raise UserError(
                f"{KEY}={ranks} does not divide the model's {count} {name} heads; write a number that divides {count}"
            )
