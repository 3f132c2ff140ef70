"""Tensor parallelism: each matrix of a layer, and the vocabulary, divided among ranks that compute the same rows.

          norm             column-wise      heads, gate     row-wise                       residual, norm
rank 0    tokens 0..n   ╮  all tokens ───── its columns ─── all tokens, part of the sum ╮  tokens 0..n
rank 1    tokens n..2n  ┴  all tokens ───── its columns ─── all tokens, part of the sum ┴  tokens n..2n
                    gathered                                              summed and scattered

The plan is the model's own, as transformers publishes it (`base_model_tp_plan`). Between the products ranks divide the tokens, after
Megatron's sequence parallelism: norms and residuals are computed, and kept for the backward pass, by one rank for each token. A
weight that is not divided thus sees a part of the tokens on each rank, or of the heads, and its gradient is the sum over the ranks.
Embedding and output layer are divided by the vocabulary; the output layer is never called, `linear_log_probs` reads the rank's part of
its weight.

Of an adapter (down, up) the factor beside what is divided is divided too: `up` of a column-wise product by its rows, `down` of a row-wise
one by its columns. The other one every rank has: of `down` it finds what its columns make of all tokens, of `up` what its own tokens
make of it, so that here, too, the gradient is a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from braidrl.errors import UserError
from braidrl.models.compute.packed import Packed
from braidrl.models.lora import NAME
from braidrl.models.parallel.pipeline import Elsewhere, is_tied, own_layers
from braidrl.models.parallel.replicated import Predict

AXIS = "tensor"
LAYERS = "layers.*."
COPIED = "replicated_with_grad_allreduce"
"""Of a weight that every rank has whole, such as the norm of heads."""
TOKENS = Shard(1)
"""Hidden states (1, N, D) of which each rank has equally many tokens."""
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": lambda: RowwiseParallel(output_layouts=TOKENS),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS),
}


def plan_of(model: Any, key: str = "trainer.layout.tensor", remedy: str = "tensor=1 and shard=full") -> dict[str, str]:
    """How each module of a decoder or a scorer is divided.

    Raises UserError, naming `key`, where there is no plan, or a style that is not known here.
    """
    # Some versions of transformers have the embedding in the plan of a tied model, none in that of others.
    plan = {**(model.config.base_model_tp_plan or {}), "embed_tokens": "embedding_rowwise"}
    unknown = sorted(set(plan.values()) - {*STYLES, COPIED})
    if len(plan) == 1 or unknown:
        why = f"uses {', '.join(unknown)}" if unknown else "has none"
        raise UserError(f"{key}: the tensor-parallel plan of {type(model).__name__} {why}; write {remedy}")
    return {name: style for name, style in plan.items() if style != COPIED}


def whole_plan_of(model: Any, key: str, remedy: str) -> dict[str, str]:
    """As `plan_of`, by the modules' names in the whole model, a linear output layer among them."""
    plan = {f"{model.base_model_prefix}.{name}": style for name, style in plan_of(model, key, remedy).items()}
    output = model.get_output_embeddings()
    if isinstance(output, nn.Linear):
        plan[next(name for name, module in model.named_modules() if module is output)] = "colwise"
    return plan


def divide_layer(layer: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Divides a decoder layer along a mesh of one dimension, in place."""
    own = in_layer(plan)
    for name, style in own.items():
        parallelize_module(layer, mesh, parts_of_module(layer, name, style))
    parallelize_module(layer, mesh, {name: AllTokens() for name in blocks_of(own)})


def parts_of_module(layer: nn.Module, name: str, style: str) -> dict[str, ParallelStyle]:
    """How a module of a layer is divided, or what it consists of where it has an adapter."""
    if not has_adapter(layer.get_submodule(name)):
        return {name: STYLES[style]()}
    down, up = f"{name}.lora_A.{NAME}", f"{name}.lora_B.{NAME}"
    whole = {f"{name}.base_layer": STYLES[style]()}
    return whole | ({down: STYLES[style]()} if style == "rowwise" else {down: Copied(), up: STYLES[style]()})


def has_adapter(module: nn.Module) -> bool:
    return hasattr(module, "base_layer")


def copied_factors(model: Any, plan: Mapping[str, str]) -> Iterator[nn.Module]:
    """Those factors of adapters that are not divided."""
    for layer in own_layers(model):
        for name, style in in_layer(plan).items():
            module: Any = layer.get_submodule(name)
            if has_adapter(module):
                yield (module.lora_A if style == "colwise" else module.lora_B)[NAME]


def in_layer(plan: Mapping[str, str]) -> dict[str, str]:
    """The styles of a layer's modules by their names in it."""
    return {name.removeprefix(LAYERS): style for name, style in plan.items() if name.startswith(LAYERS)}


def blocks_of(styles: Mapping[str, str]) -> set[str]:
    """The modules of a layer that begin with column-wise products: tokens are gathered once for all of these."""
    return {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"}


def divide_rest(model: Any, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Divides what a model has beside its layers: the vocabulary, and the tokens of the last norm."""
    output, tied, body = model.get_output_embeddings(), is_tied(model), model.base_model
    rest = {name: STYLES[style]() for name, style in plan.items() if not name.startswith(LAYERS)}
    if isinstance(model.get_input_embeddings(), Elsewhere):
        del rest["embed_tokens"]
    if not isinstance(body.norm, Elsewhere):
        rest["norm"] = PrepareModuleOutput(output_layouts=TOKENS, desired_output_layouts=Replicate())
    parallelize_module(body, mesh, rest)
    if tied:
        output.weight = model.get_input_embeddings().weight
    elif isinstance(output, nn.Linear):
        parallelize_module(output, mesh, ColwiseParallel())


class AllTokens(ParallelStyle):
    """Brings together the tokens of a module's first argument, of which each rank has its own.

    What the module makes of them is each rank's part of a sum, and so is their gradient: it is summed and scattered.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gathered(own: Tensor) -> Tensor:
            return DTensor.from_local(own, device_mesh, [TOKENS], run_check=False).redistribute(
                placements=[Replicate()]
            )

        def prepared(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if given:
                return (gathered(given[0]), *given[1:]), named
            return given, {**named, "hidden_states": gathered(named["hidden_states"])}

        module.register_forward_pre_hook(prepared, with_kwargs=True)
        return module


class Copied(ParallelStyle):
    """A module that every rank has whole, between others that are divided: each finds a part of the gradients of its weights and input."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def prepared(_: nn.Module, given: tuple[Any, ...]) -> Tensor:
            own: Tensor = given[0].to_local(grad_placements=(Partial(),))
            return own

        def known(_: nn.Module, __: Any, own: Tensor) -> Tensor:
            return DTensor.from_local(own, device_mesh, (Replicate(),), run_check=False, grad_placements=(Partial(),))

        module.register_forward_pre_hook(prepared)
        module.register_forward_hook(known)
        return module


def found_in_parts(model: Any) -> list[Tensor]:
    """The weights that every rank has whole, and of whose gradient each finds what its own tokens or heads give."""
    modules = [*own_layers(model), model.base_model.norm]
    return [parameter for module in modules for parameter in module.parameters() if not is_divided(parameter)]


def is_divided(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and AXIS in (parameter.device_mesh.mesh_dim_names or ())


def evened(predict: Predict, divisor: int) -> Predict:
    """A prediction whose tokens are filled up to a number that so many ranks can divide."""

    def filled_up(packed: Packed, *objective: Any) -> dict[str, Tensor]:
        return predict(packed.padded(-(-len(packed.input_ids) // divisor) * divisor), *objective)

    return filled_up
