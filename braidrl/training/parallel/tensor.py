"""Tensor parallelism: the matrices of each layer, and the vocabulary, sharded over ranks that compute the same rows.

          norm             column-wise      heads, gate     row-wise                       residual, norm
rank 0    tokens 0..n   ╮  all tokens ───── its columns ─── all tokens, part of the sum ╮  tokens 0..n
rank 1    tokens n..2n  ┴  all tokens ───── its columns ─── all tokens, part of the sum ┴  tokens n..2n
                    gathered                                              summed and scattered

The plan comes from the model (`base_model_tp_plan` of transformers). Between a layer's blocks (attention, MLP), tokens
are sharded as in Megatron's sequence parallelism: one rank computes, and saves for the backward pass, the norms and
residuals of each token. Within a block every plain tensor has all tokens, and its gradient on a rank is a part of the
sum over ranks: for this rank's columns, heads or tokens. So the gradient of a replicated weight is also summed over
ranks.

    matrices    column-wise and row-wise products; where heads cannot be split, the ranks gather the outputs of columns
    attention   that the plan does not split: every rank computes all tokens
    experts     each rank computes its tokens with all experts

The weights of the last two are sharded too: FSDP2 gathers them, over the tensor ranks, while a block computes.

Embedding and output layer are sharded by vocabulary. The output layer is never called: `linear_log_probs` reads this
rank's shard of its weight.

Adapters (down, up): the factor next to the sharded dimension is sharded too: `up` of a column-wise product by rows,
`down` of a row-wise one by columns. The other factor is replicated.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map
from transformers.utils import ModelOutput

from braidrl.errors import UserError
from braidrl.training.compute.attention import HEADS_RANK
from braidrl.training.decoders.body import TOKENS_RANK, body_of
from braidrl.training.decoders.head import head_of
from braidrl.training.lora import NAME
from braidrl.training.parallel.experts import experts_of
from braidrl.training.parallel.pipeline import PassThrough, is_tied
from braidrl.weights.boxes import pattern_of

LAYERS = "layers.*."
TOKENS = Shard(1)
"""Hidden states (1, N, D) sharded equally by tokens."""
LAYER_NUMBER = "layer_idx"
"""The attribute by which transformers' attention layers find their cache."""
REPLICATED = ("replicated_with_grad_allreduce", "mla_kv_a_proj")
"""The styles of modules that every rank computes in full."""


def local_chunk(tensor: Tensor, mesh: DeviceMesh, dimension: int) -> Tensor:
    return tensor.chunk(mesh.size(), dimension)[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)


COLUMNS = ("colwise", "colwise_gather_output")
ROWS = ("rowwise", "rowwise_split_input")


class Replicated(torch.autograd.Function):
    """A replicated tensor as a DTensor; the gradient of a rank stays a partial sum.

    `DTensor.from_local` would all-reduce the gradient here, for each product of a block; torch 2.11 has no option
    against that.
    """

    @staticmethod
    def forward(context: Any, local: Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(local, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient.redistribute(placements=[Partial()]).to_local(), None


def shard_product(module: nn.Module, mesh: DeviceMesh, style: str) -> None:
    """Shard a matrix in place by a style of COLUMNS or ROWS; ranks gather outputs, and split inputs, where heads cannot
    be split.
    """
    if style in ROWS:
        if style == "rowwise_split_input":
            module.register_forward_pre_hook(lambda _, inputs: (local_chunk(inputs[0], mesh, -1), *inputs[1:]))
        # Summed, and scattered to the ranks' tokens.
        parallelize_module(module, mesh, RowwiseParallel(output_layouts=TOKENS))
        return
    module.register_forward_pre_hook(lambda _, inputs: (Replicated.apply(inputs[0], mesh), *inputs[1:]))
    gathers = style == "colwise_gather_output"
    parallelize_module(module, mesh, ColwiseParallel(use_local_output=not gathers))
    if gathers:
        module.register_forward_hook(
            lambda _, __, columns: columns.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        )


def plan_of(model: Any, key: str = "trainer.layout.tensor", remedy: str = "tensor=1 and shard=full") -> dict[str, str]:
    """Return the style of each module of a model. Raises UserError, naming `key`, for a model without a plan."""
    plan = model.config.get_text_config().base_model_tp_plan
    if not any("*" in name for name in plan or ()):  # of each layer, not of embeddings alone
        raise UserError(f"{key}: transformers has no tensor-parallel plan of {type(model).__name__}; write {remedy}")
    # The embedding is in no plan, except for tied models in some versions of transformers.
    return {**plan, "embed_tokens": "embedding_rowwise"}


def full_plan_of(model: Any, key: str, remedy: str) -> dict[str, str]:
    """Return `plan_of` by full module names, with a linear output layer, for decoding. Experts are not in it: ranks
    share them by number.

    Raises UserError for a style without slices, and for experts that are not stacked.
    """
    layer_plan = plan_of(model, key, remedy)
    experts = [name for name, style in layer_plan.items() if style == "moe_tp_experts"]
    if stacks := experts_of(model):
        if not all(hasattr(module, "has_gate") for module in stacks):
            raise UserError(f"{key}: transformers computes {type(stacks[0]).__name__} one by one; write {remedy}")
        layer_plan = {name: style for name, style in layer_plan.items() if not name.startswith(tuple(experts))}
    if unknown := sorted(set(layer_plan.values()) - {"colwise", "rowwise", "embedding_rowwise", *REPLICATED[:1]}):
        raise UserError(
            f"{key}: the tensor-parallel plan of {type(model).__name__} uses {', '.join(unknown)}; write {remedy}"
        )
    plan = {f"{model.base_model_prefix}.{name}": style for name, style in layer_plan.items()}
    output = model.get_output_embeddings()
    if isinstance(output, nn.Linear):
        plan[next(name for name, module in model.named_modules() if module is output)] = "colwise"
    return plan


@dataclass(frozen=True)
class LayerBlock:
    """A part of a layer, such as attention or an MLP: a module that is not in a list."""

    name: str
    products: dict[str, str]
    """The style of each matrix; without any, FSDP shards the block's weights over the tensor ranks."""
    gathers: dict[str, bool]
    """The modules whose input is gathered, each with True if its output has all tokens, and this rank's are taken."""


def blocks_of(layer: nn.Module, plan: Mapping[str, str], mixers: Collection[str] = ()) -> list[LayerBlock]:
    """Return the blocks of a layer that are sharded by the styles of `plan_of`; others are replicated.

    `mixers` are names of classes.
    """
    styles: dict[str, dict[str, str]] = {}
    for name, _ in layer.named_modules():
        around = [name.rsplit(".", up)[0] for up in range(name.count("."), -1, -1)]
        block = next((n for n in around if not isinstance(layer.get_submodule(n), nn.ModuleList)), "")
        style = plan.get(LAYERS + pattern_of(name), "")
        if block:
            styles.setdefault(block, {}).update({name: style} if style and style not in REPLICATED else {})
    blocks = []
    for block, products in styles.items():
        inside = list(layer.get_submodule(block).modules())
        is_mixer = any(type(module).__name__ in mixers for module in inside)
        needs_all = is_mixer or any(hasattr(module, LAYER_NUMBER) for module in inside)
        # A mixer computes rows of equal length: outputs inside of it cannot be scattered by tokens.
        if products and set(products.values()) <= {*COLUMNS, *(() if is_mixer else ROWS)}:
            parents = {name.rpartition(".")[0] for name, style in products.items() if style in COLUMNS}
            gathers = {}
            for parent in {block} if needs_all else parents:
                inner = [style for name, style in products.items() if name.startswith(parent)]
                gathers[parent] = not any(style in ROWS for style in inner)
            blocks.append(LayerBlock(block, products, gathers))
        elif needs_all or products:
            blocks.append(LayerBlock(block, {}, {block: True} if needs_all else {}))
    return blocks


def parallelize_layer(
    layer: nn.Module, blocks: Iterable[LayerBlock], mesh: DeviceMesh, shard: Callable[[nn.Module], None]
) -> None:
    """Shard a layer's blocks in place over the tensor ranks; `shard` shards weights over ranks of other tokens."""
    for block in blocks:
        module = layer.get_submodule(block.name)
        for name, style in block.products.items():
            matrices = [name]
            if hasattr(layer.get_submodule(name), "base_layer"):
                # An adapter: its base, and its factor next to the sharded dimension.
                matrices = [f"{name}.base_layer", f"{name}.lora_{'A' if style in ROWS else 'B'}.{NAME}"]
            for matrix in matrices:
                shard_product(layer.get_submodule(matrix), mesh, style)
        for name, scatter in block.gathers.items():
            gather_tokens(
                layer.get_submodule(name),
                # The gradients of all tokens are reduce-scattered.
                lambda local: (
                    DTensor.from_local(local, mesh, [TOKENS], run_check=False)
                    .redistribute(placements=[Replicate()])
                    .to_local(grad_placements=[Partial()])
                ),
                (lambda states: local_chunk(states, mesh, 1)) if scatter else None,
            )
        for part in module.modules() if block.products else ():
            if hasattr(part, LAYER_NUMBER):
                setattr(part, HEADS_RANK, mesh.get_local_rank())
        if not block.products:
            # FSDP must not get a view, which the layer may change in place.
            module.register_forward_hook(lambda _, __, output: tree_map(copy_of_view, output))
            shard(module)


def copy_of_view(leaf: Any) -> Any:
    """Return a copy of a tensor that is a view; any other value unchanged."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf._is_view() else leaf


def gather_tokens(
    block: nn.Module, gather: Callable[[Tensor], Tensor], shard: Callable[[Tensor], Tensor] | None
) -> None:
    """Gather the tokens of a block's first argument; with `shard`, return this rank's hidden states."""

    def gathered(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        states = gather(arguments[0] if arguments else named["hidden_states"])
        return ((states, *arguments[1:]), named) if arguments else (arguments, {**named, "hidden_states": states})

    block.register_forward_pre_hook(gathered, with_kwargs=True)
    if shard is not None:
        shared = lambda part: shard(part) if isinstance(part, Tensor) and part.dim() == 3 else part  # noqa: E731
        block.register_forward_hook(lambda _, __, output: tree_map(shared, output))


def parallelize_rest(model: Any, mesh: DeviceMesh) -> None:
    """Shard everything outside the layers: the vocabulary of embedding and output layer, and the last norm's tokens."""
    output, tied, body = model.get_output_embeddings(), is_tied(model), body_of(model)
    if not isinstance(body.embedding, PassThrough):
        parallelize_module(body.embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS))
        setattr(body.embedding, TOKENS_RANK, (mesh.get_local_rank(), mesh.size()))
    if not isinstance(body.norm, PassThrough):

        def gathered(_: nn.Module, __: Any, output: Any) -> Any:
            if isinstance(output, ModelOutput):  # not the given states of `model_logits`
                local = DTensor.from_local(output.last_hidden_state, mesh, [TOKENS], run_check=False)
                output["last_hidden_state"] = local.redistribute(placements=[Replicate()]).to_local()
            return output

        body.decoder.register_forward_hook(gathered)
    if tied:
        output.weight = model.get_input_embeddings().weight
    elif isinstance(output, nn.Linear) and not head_of(model).is_own:
        parallelize_module(output, mesh, ColwiseParallel())
