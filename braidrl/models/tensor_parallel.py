"""Tensor parallelism: each matrix of a layer, and the vocabulary, divided among ranks that compute the same rows.

The plan is the model's own, as transformers publishes it (`base_model_tp_plan`). Embedding and output layer are divided by the
vocabulary; the output layer is never called, `linear_log_probs` reads the rank's part of its weight.
"""

from __future__ import annotations

from collections.abc import Callable
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
from braidrl.models.pipeline import Elsewhere, is_tied, own_layers

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


def divide(model: Any, mesh: DeviceMesh) -> None:
    """Divides a decoder or a scorer along a mesh of one dimension, in place.

    Raises UserError for a model without a plan, or with a style in it that is not known here.
    """
    # Some versions of transformers have the embedding in the plan of a tied model, none in that of others.
    plan = {**(model.config.base_model_tp_plan or {}), "embed_tokens": "embedding_rowwise"}
    unknown = sorted(set(plan.values()) - set(STYLES))
    if len(plan) == 1 or unknown:
        why = f"uses {', '.join(unknown)}" if unknown else "has none"
        raise UserError(
            f"trainer.layout.tensor: the tensor-parallel plan of {type(model).__name__} {why}; write tensor=1 and shard=full"
        )
    tokens, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = is_tied(model)
    body = {name: STYLES[style]() for name, style in plan.items() if not name.startswith(LAYERS)}
    if isinstance(tokens, Elsewhere):
        del body["embed_tokens"]
    parallelize_module(model.base_model, mesh, body)
    for layer in own_layers(model):
        of_layer = {n.removeprefix(LAYERS): STYLES[s]() for n, s in plan.items() if n.startswith(LAYERS)}
        parallelize_module(layer, mesh, of_layer)
    if tied:
        output.weight = tokens.weight
    elif isinstance(output, nn.Linear):
        parallelize_module(output, mesh, ColwiseParallel())
