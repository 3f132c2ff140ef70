"""Tensor parallelism: the matrices of each layer, and the vocabulary, sharded over ranks that compute the same rows.

          norm             column-wise      heads, gate     row-wise                       residual, norm
rank 0    tokens 0..n   ╮  all tokens ───── its columns ─── all tokens, part of the sum ╮  tokens 0..n
rank 1    tokens n..2n  ┴  all tokens ───── its columns ─── all tokens, part of the sum ┴  tokens n..2n
                    gathered                                              summed and scattered

The plan is the model's own (`base_model_tp_plan` of transformers). Between matrix products, tokens are sharded as in Megatron's sequence
parallelism: one rank computes, and saves for the backward pass, the norms and residuals of each token. A replicated weight thus sees a
part of the tokens or heads on each rank, and its gradient is the sum over ranks. Embedding and output layer are sharded by vocabulary.
The output layer is never called: `linear_log_probs` reads this rank's shard of its weight.

Adapters (down, up): the factor next to the sharded dimension is sharded too: `up` of a column-wise product by rows, `down` of a row-wise
one by columns. The other factor is replicated. Its local gradient covers only this rank's columns (`down`) or tokens (`up`), so it is
also summed over ranks.
"""

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
from braidrl.training.compute.packed import Packed
from braidrl.training.decoders.body import body_of
from braidrl.training.lora import NAME
from braidrl.training.parallel.pipeline import PassThrough, is_tied, local_layers
from braidrl.training.parallel.replicated import Predict

AXIS = "tensor"
LAYERS = "layers.*."
COPIED = "replicated_with_grad_allreduce"
"""The style of a replicated weight, such as a norm of heads."""
TOKENS = Shard(1)
"""Hidden states (1, N, D) sharded equally by tokens."""
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": lambda: RowwiseParallel(output_layouts=TOKENS),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS),
}


def plan_of(model: Any, key: str = "trainer.layout.tensor", remedy: str = "tensor=1 and shard=full") -> dict[str, str]:
    """Return the style of each module of a model. Raises UserError, naming `key`, without a plan and for an unknown style."""
    # The embedding is in no plan, except for tied models in some versions of transformers.
    plan = {**(model.config.base_model_tp_plan or {}), "embed_tokens": "embedding_rowwise"}
    unknown = sorted(set(plan.values()) - {*STYLES, COPIED})
    if len(plan) == 1 or unknown:
        why = f"uses {', '.join(unknown)}" if unknown else "has none"
        raise UserError(f"{key}: the tensor-parallel plan of {type(model).__name__} {why}; write {remedy}")
    return {name: style for name, style in plan.items() if style != COPIED}


def full_plan_of(model: Any, key: str, remedy: str) -> dict[str, str]:
    """Return `plan_of` by full module names, with a linear output layer."""
    plan = {f"{model.base_model_prefix}.{name}": style for name, style in plan_of(model, key, remedy).items()}
    output = model.get_output_embeddings()
    if isinstance(output, nn.Linear):
        plan[next(name for name, module in model.named_modules() if module is output)] = "colwise"
    return plan


def parallelize_layer(layer: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Shard a decoder layer in place over a one-dimensional mesh."""
    own = in_layer(plan)
    for name, style in own.items():
        parallelize_module(layer, mesh, styles_of_module(layer, name, style))
    parallelize_module(layer, mesh, {name: GatherTokens() for name in blocks_of(own)})


def styles_of_module(layer: nn.Module, name: str, style: str) -> dict[str, ParallelStyle]:
    """Return the parallel style of a layer's module, or of its base and adapter factors."""
    if not has_adapter(layer.get_submodule(name)):
        return {name: STYLES[style]()}
    down, up = f"{name}.lora_A.{NAME}", f"{name}.lora_B.{NAME}"
    whole = {f"{name}.base_layer": STYLES[style]()}
    return whole | ({down: STYLES[style]()} if style == "rowwise" else {down: ReplicatedModule(), up: STYLES[style]()})


def has_adapter(module: nn.Module) -> bool:
    return hasattr(module, "base_layer")


def copied_factors(model: Any, plan: Mapping[str, str]) -> Iterator[nn.Module]:
    """Yield the replicated adapter factors."""
    for layer in local_layers(model):
        for name, style in in_layer(plan).items():
            module: Any = layer.get_submodule(name)
            if has_adapter(module):
                yield (module.lora_A if style == "colwise" else module.lora_B)[NAME]


def in_layer(plan: Mapping[str, str]) -> dict[str, str]:
    """Return the styles of one layer's modules by their names in the layer."""
    return {name.removeprefix(LAYERS): style for name, style in plan.items() if name.startswith(LAYERS)}


def blocks_of(styles: Mapping[str, str]) -> set[str]:
    """Return the modules of a layer that start with column-wise products; tokens are gathered once per module."""
    return {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"}


def parallelize_rest(model: Any, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Shard everything outside the layers: the vocabulary, and the tokens of the last norm."""
    output, tied, body = model.get_output_embeddings(), is_tied(model), body_of(model)
    rest = {name: STYLES[style]() for name, style in plan.items() if not name.startswith(LAYERS)}
    if isinstance(model.get_input_embeddings(), PassThrough):
        del rest["embed_tokens"]
    if not isinstance(body.norm, PassThrough):
        rest[body.norm_name] = PrepareModuleOutput(output_layouts=TOKENS, desired_output_layouts=Replicate())
    parallelize_module(body.decoder, mesh, rest)
    if tied:
        output.weight = model.get_input_embeddings().weight
    elif isinstance(output, nn.Linear):
        parallelize_module(output, mesh, ColwiseParallel())


class GatherTokens(ParallelStyle):
    """A style that gathers the tokens of a module's first argument.

    The gradient of the input is a partial sum on each rank; it is reduce-scattered.
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


class ReplicatedModule(ParallelStyle):
    """A replicated module between sharded ones: the gradients of its weights and input are partial sums on each rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def prepared(_: nn.Module, given: tuple[Any, ...]) -> Tensor:
            own: Tensor = given[0].to_local(grad_placements=(Partial(),))
            return own

        def known(_: nn.Module, __: Any, own: Tensor) -> Tensor:
            return DTensor.from_local(own, device_mesh, (Replicate(),), run_check=False, grad_placements=(Partial(),))

        module.register_forward_pre_hook(prepared)
        module.register_forward_hook(known)
        return module


def partial_gradient_parameters(model: Any) -> list[Tensor]:
    """Return the replicated parameters whose gradient is a partial sum, over this rank's tokens or heads."""
    modules = [*local_layers(model), body_of(model).norm]
    return [parameter for module in modules for parameter in module.parameters() if not is_tensor_parallel(parameter)]


def is_tensor_parallel(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and AXIS in (parameter.device_mesh.mesh_dim_names or ())


def pad_to_multiple(predict: Predict, divisor: int) -> Predict:
    """Wrap `predict` to pad its tokens to a multiple of `divisor`."""

    def filled_up(packed: Packed, *objective: Any) -> dict[str, Tensor]:
        return predict(packed.padded(-(-len(packed.input_ids) // divisor) * divisor), *objective)

    return filled_up
