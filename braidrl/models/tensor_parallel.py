"""Tensor parallelism: each matrix of a layer, and the vocabulary, divided among ranks that compute the same rows.

The plan is the model's own, as transformers publishes it (`base_model_tp_plan`). Embedding and output layer are divided by the
vocabulary; the output layer is never called, `linear_log_probs` reads the rank's part of its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from braidrl.errors import UserError
from braidrl.models.pipeline import Elsewhere, is_tied

LAYERS = "layers.*."
HEADS = 2
"""The dimension of heads where queries and keys are normalised: (1, tokens, heads, width)."""
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    # One weight for all heads, of which each rank has its own: its gradient is the sum over ranks.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=HEADS, use_local_output=True),
}


def plan_of(model: Any, key: str = "trainer.layout.tensor", remedy: str = "tensor=1 and shard=full") -> dict[str, str]:
    """How each module of a decoder or a scorer is divided.

    Raises UserError, naming `key`, where there is no plan, or a style that is not known here.
    """
    # Some versions of transformers have the embedding in the plan of a tied model, none in that of others.
    plan = {**(model.config.base_model_tp_plan or {}), "embed_tokens": "embedding_rowwise"}
    unknown = sorted(set(plan.values()) - set(STYLES))
    if len(plan) == 1 or unknown:
        why = f"uses {', '.join(unknown)}" if unknown else "has none"
        raise UserError(f"{key}: the tensor-parallel plan of {type(model).__name__} {why}; write {remedy}")
    return plan


def whole_plan_of(model: Any, key: str, remedy: str) -> dict[str, str]:
    """As `plan_of`, by the modules' names in the whole model, a linear output layer among them."""
    plan = {f"{model.base_model_prefix}.{name}": style for name, style in plan_of(model, key, remedy).items()}
    output = model.get_output_embeddings()
    if isinstance(output, nn.Linear):
        plan[next(name for name, module in model.named_modules() if module is output)] = "colwise"
    return plan


def divide_layer(layer: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Divides a decoder layer along a mesh of one dimension, in place."""
    own = {name.removeprefix(LAYERS): STYLES[style]() for name, style in plan.items() if name.startswith(LAYERS)}
    parallelize_module(layer, mesh, own)


def divide_rest(model: Any, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Divides what a model has beside its layers: the vocabulary."""
    output, tied = model.get_output_embeddings(), is_tied(model)
    rest = {name: STYLES[style]() for name, style in plan.items() if not name.startswith(LAYERS)}
    if isinstance(model.get_input_embeddings(), Elsewhere):
        del rest["embed_tokens"]
    parallelize_module(model.base_model, mesh, rest)
    if tied:
        output.weight = model.get_input_embeddings().weight
    elif isinstance(output, nn.Linear):
        parallelize_module(output, mesh, ColwiseParallel())
