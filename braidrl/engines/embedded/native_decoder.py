"""One decode step of a Llama-like model by fused kernels: compiled ones on a CPU (`cpu_kernels.py`), Triton's on CUDA
(`cuda_kernels.py`). Matrix products are compiled too on a CPU, or by torch on processors that multiply bfloat16.

token ─▶ [norm ─▶ q k v ─▶ rotate, store, attend ─▶ o ─▶ add, norm ─▶ gate up ─▶ silu · ─▶ down] × layers ─▶ norm
    ─▶ logits ─▶ draw

In a mixture one kernel chooses the experts and another one computes them. If several policies share the weights, a
product is followed by that of their adapters. A step reads one or several tokens of each row. Each token reads the keys
of its slot up to its position, so a long row does not slow down others. The residual stream is float32 for weights of
any dtype.

Shapes: B tokens in the step, W width, H query heads, K key heads, D head width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton
from transformers import PreTrainedModel

from braidrl.engines.embedded.adapters import PolicyAdapters, SideBySide
from braidrl.engines.embedded.cpu_kernels import Kernels
from braidrl.engines.embedded.sharded_decoding import SendHidden
from braidrl.engines.embedded.slot_states import ROW_MULTIPLE
from braidrl.native.building import library
from braidrl.native.linear import (
    ProductLinear,
    chosen_experts,
    gated_experts,
    has_row_product,
    packed,
    packed_bytes,
    product,
    row_product,
)
from braidrl.training.compute.cuda_layers import DTYPES
from braidrl.training.compute.slots import SlotCache
from braidrl.training.decoders.body import decoder_of
from braidrl.training.decoders.routing import record
from braidrl.training.lora import is_adapter
from braidrl.training.parallel.pipeline import local_layers

if TYPE_CHECKING:
    # Imported where it is used: it needs Triton.
    from braidrl.engines.embedded.cuda_kernels import CudaKernels

FAMILIES = {"qwen2", "qwen3", "llama", "qwen3_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}
"""Types of text models. Behind a prompt all axes of a token's position are equal, and a rope of several is one."""


class StepKernels(Protocol):
    """The kernels of a layer's decode step between its products; see `cpu_kernels.Kernels`."""

    def add_norm(self, residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> Tensor: ...

    def gated(self, both: Tensor) -> Tensor: ...

    def attend(
        self,
        projected: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        epsilon: float,
        angles: tuple[Tensor, Tensor],
        slots: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        scaling: float,
    ) -> Tensor: ...


KernelsT = TypeVar("KernelsT", bound=StepKernels)


def native_decoder(model: PreTrainedModel, adapters: PolicyAdapters | None = None) -> "NativeDecoder[Kernels] | None":
    """Return a compiled decoder for a model on a CPU, with `adapters` of several policies.

    Returns None if the kernels do not support the model or no compiler works.
    """
    if not is_supported(model):
        return None
    # Products must give a row the same bits for any number of rows: an expert may have one row or all.
    mixtures = [layer.mlp for layer in local_layers(model) if hasattr(layer.mlp, "experts")]
    if mixtures and not (has_row_product(model.dtype) and all(is_undivided(mixture) for mixture in mixtures)):
        return None
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        return None
    config: Any = model.config.get_text_config()
    group = config.num_attention_heads // config.num_key_value_heads
    functions = library("decode", model.dtype, HEAD=head_width(config), GROUP=group)
    return None if functions is None else NativeDecoder(model, Kernels(functions, model.dtype), adapters)


def cuda_decoder(model: PreTrainedModel) -> "NativeDecoder[CudaKernels] | None":
    """Return a decoder by Triton kernels for a model on CUDA; None if they do not support it, or without Triton."""
    linears = [module for layer in local_layers(model) for module in layer.modules() if hasattr(module, "in_features")]
    if not is_supported(model) or not all(map(is_plain, linears)):
        return None
    if any(hasattr(layer.mlp, "experts") for layer in local_layers(model)):
        return None
    width = head_width(model.config.get_text_config())
    if model.device.type != "cuda" or model.dtype not in DTYPES or width & (width - 1) or not has_triton():
        return None
    from braidrl.engines.embedded.cuda_kernels import CudaKernels

    return NativeDecoder(model, CudaKernels())


def is_supported(model: PreTrainedModel) -> bool:
    """Return True for a model whose layers are computed as `NativeDecoder` does."""
    config: Any = model.config.get_text_config()
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return False
    return not any(is_adapter(name) for name, _ in model.named_parameters())


def head_width(config: Any) -> int:
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width


def is_undivided(mixture: Any) -> bool:
    """Return True if a mixture's forward pass involves no rank with another part of the experts."""
    experts = mixture.experts
    shape = experts.num_experts, 2 * experts.intermediate_dim, experts.hidden_dim
    hooks = [hooks for module in mixture.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    return tuple(experts.gate_up_proj.shape) == shape and not any(hooks)


@dataclass(frozen=True)
class Gated:
    """The weights of a gated MLP."""

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: nn.Module
    adapters: SideBySide | None
    """The adapters of `gate_up`."""


@dataclass(frozen=True)
class Mixture:
    """The weights of E experts of width I."""

    router: Any
    """A module with a weight (E, W)."""
    gate_up: Tensor
    """(E, 2I, W)."""
    down: Tensor
    """(E, W, I)."""


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's weights, as views of the module's parameters."""

    input_norm: Tensor
    projections: Tensor
    projection_bias: Tensor | None
    adapters: SideBySide | None
    """The adapters of `projections`."""
    head_norms: tuple[Tensor, Tensor] | None
    output: nn.Module
    """Called as a module, because it runs a collective in a tensor-parallel model."""
    post_norm: Tensor
    mlp: Gated | Mixture
    window: int | None
    scaling: float


class NativeDecoder(Generic[KernelsT]):
    """A decoder that reads the weights of `model` in place; see `native_decoder` for the supported models."""

    def __init__(self, model: PreTrainedModel, kernels: KernelsT, adapters: PolicyAdapters | None = None) -> None:
        config: Any = model.config.get_text_config()
        self._model, self._epsilon, self.kernels = model, float(config.rms_norm_eps), kernels
        self._adapters = adapters
        self._side_by_side: dict[tuple[nn.Module, ...], SideBySide | None] = {}
        """Copies of the policies' adapters by the layers that a product is for, as of the change `_adapter_changes`."""
        self._adapter_changes = -1
        self._policies: Tensor | None = None
        """The number of the policy of each token in this step."""
        self._by_row = model.device.type == "cpu" and has_row_product(model.dtype)
        self.row_multiple = 4 if self._by_row else ROW_MULTIPLE
        """Tokens of a step are a multiple of this: few sizes of steps, or what gives a row the same bits."""
        self._panels: dict[int, Tensor] = {}
        """Each matrix in the order in which the product reads it, by its address."""
        self._as_of: list[tuple[int, int]] = []
        """Addresses and versions of the weights that were looked up and packed."""
        weighted = *local_layers(model), model.get_output_embeddings() or nn.Identity()
        self._modules = [module for part in weighted for module in part.modules() if module._parameters]
        self._cached = config.num_key_value_heads, (head_width(config),) * 2
        self._look_up()

    def refresh(self) -> None:
        """Read weights that have moved or changed, and adapters that have changed."""
        if self._weights_now() == self._as_of:
            return
        self._look_up()
        if self.packed_bytes:
            self._panels = {matrix.data_ptr(): packed(matrix) for matrix in self._matrices()}
        self._as_of = self._weights_now()

    def release(self) -> None:
        """Free the packed matrices, which are outdated or no longer needed."""
        self._panels, self._as_of = {}, []

    def _weights_now(self) -> list[tuple[int, int]]:
        """Return what changes when a weight moves or is written, or an adapter changes."""
        weights = [weight for module in self._modules for weight in module._parameters.values() if weight is not None]
        changes = 0 if self._adapters is None else self._adapters.changes
        return [(changes, 0), *((weight.data_ptr(), weight._version) for weight in weights)]

    def _look_up(self) -> None:
        """Look up the weights, and the adapters if they have changed."""
        if self._adapters is not None and self._adapter_changes != self._adapters.changes:
            self._adapter_changes = self._adapters.changes
            self._side_by_side.clear()
        self._layers = []
        module: Any
        for module in local_layers(self._model):
            attention, mlp = module.self_attn, module.mlp
            norms = None
            if hasattr(attention, "q_norm"):
                norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
            heads = [attention.q_proj, attention.k_proj, attention.v_proj]
            projections, bias = joined(heads)
            if hasattr(mlp, "experts"):
                weights = (mlp.experts.gate_up_proj.detach(), mlp.experts.down_proj.detach())
                feed_forward: Gated | Mixture = Mixture(mlp.gate, *weights)
            else:
                both = [mlp.gate_proj, mlp.up_proj]
                feed_forward = Gated(*joined(both), mlp.down_proj, self._adapters_of(both))
            self._layers.append(
                DecoderLayer(
                    module.input_layernorm.weight.detach(),
                    projections,
                    bias,
                    self._adapters_of(heads),
                    norms,
                    attention.o_proj,
                    module.post_attention_layernorm.weight.detach(),
                    feed_forward,
                    getattr(attention, "sliding_window", None),
                    float(attention.scaling),
                )
            )

    @property
    def packed_bytes(self) -> int:
        return packed_bytes(self._matrices()) if self._by_row else 0

    def _matrices(self) -> list[Tensor]:
        """Return the matrices (N, K) of this rank's products, and those of all experts (E, N, K)."""
        matrices = [layer.projections for layer in self._layers]
        linears: list[Any] = [layer.output for layer in self._layers]
        for layer in self._layers:
            if isinstance(layer.mlp, Mixture):
                matrices += [layer.mlp.router.weight.detach(), layer.mlp.gate_up, layer.mlp.down]
            else:
                matrices.append(layer.mlp.gate_up)
                linears.append(layer.mlp.down)
        if not isinstance(decoder_of(self._model).norm, SendHidden):
            linears.append(self._model.get_output_embeddings())
        return matrices + [linear.weight.detach() for linear in linears if is_plain(linear)]

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x (B, K) @ weight (N, K).T + bias (N,)."""
        if not self._by_row:
            return product(x, weight, bias)
        return row_product(x, weight, bias, self._panels.get(weight.data_ptr()))

    def _adapters_of(self, layers: Sequence[nn.Module]) -> SideBySide | None:
        if self._adapters is None:
            return None
        if (key := tuple(layers)) not in self._side_by_side:
            self._side_by_side[key] = self._adapters.side_by_side(layers)
        return self._side_by_side[key]

    def logits(
        self,
        tokens: Tensor,
        slots: Tensor,
        positions: Tensor,
        cache: SlotCache,
        rope_shift: Tensor | None = None,
        policies: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, V) for tokens (B,) of these slots (B,); before a pipeline's last rank, the hidden states
        sent.

        `rope_shift` (B,) is the rope's offset of positions, and `policies` (B,) are the numbers of the tokens'
        policies.
        """
        self._policies = policies
        body: Any = decoder_of(self._model)
        kernels, epsilon = self.kernels, self._epsilon
        residual = body.embed_tokens(tokens[:, None])[:, 0].float()
        turned = positions if rope_shift is None else positions + rope_shift
        cosine, sine = body.rotary_emb(residual, turned[:, None])
        angles = (cosine[:, 0].contiguous(), sine[:, 0].contiguous())
        update = None
        for number, layer in enumerate(self._layers):
            normed = kernels.add_norm(residual, update, layer.input_norm, epsilon)
            projected = self._product(normed, layer.projections, layer.projection_bias)
            projected = self._adapted(projected, normed, layer.adapters)
            keys, values = cache.layer(number, *self._cached)
            attended = kernels.attend(
                projected,
                layer.head_norms,
                epsilon,
                angles,
                slots,
                positions,
                keys,
                values,
                layer.window,
                layer.scaling,
            )
            update = self._linear(layer.output, attended)
            normed = kernels.add_norm(residual, update, layer.post_norm, epsilon)
            update = self._feed_forward(layer.mlp, normed)
        if isinstance(body.norm, SendHidden):
            sent: Tensor = body.norm(residual + update)
            return sent
        normed = kernels.add_norm(residual, update, body.norm.weight, epsilon)
        return self._linear(self._model.get_output_embeddings(), normed)

    def _feed_forward(self, mlp: Gated | Mixture, x: Tensor) -> Tensor:
        """Return down(silu(gate(x)) · up(x)), (B, W), of x (B, W)."""
        if isinstance(mlp, Mixture):
            return self._mixed(mlp, x)
        both = self._adapted(self._product(x, mlp.gate_up, mlp.gate_up_bias), x, mlp.adapters)
        return self._linear(mlp.down, self.kernels.gated(both))

    def _mixed(self, mixture: Mixture, x: Tensor) -> Tensor:
        """Return the weighted sums (B, W) of the experts that the router chooses for x (B, W)."""
        router = mixture.router
        logits = self._product(x, router.weight.detach())
        chosen, weights = chosen_experts(logits, router.top_k, router.norm_topk_prob)
        record(router, chosen)
        panels = self._panels.get(mixture.gate_up.data_ptr()), self._panels.get(mixture.down.data_ptr())
        return gated_experts(x, chosen, weights, mixture.gate_up, mixture.down, panels)

    def _adapted(self, output: Tensor, x: Tensor, adapters: SideBySide | None) -> Tensor:
        """Add to a product's output (B, N), of x (B, W), the contribution of each token's adapter."""
        if adapters is None or self._policies is None:
            return output
        narrow = self._product(x, adapters.down) * (self._policies[:, None] == adapters.policies)
        return output.add_(self._product(narrow, adapters.up))

    def _linear(self, module: Any, x: Tensor) -> Tensor:
        """Apply a linear layer, with its hooks, and with its collective if it is sharded."""
        if (adapters := self._adapters_of([module])) is not None:
            weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
            return self._adapted(self._product(x, weight, bias), x, adapters)
        if self._by_row and is_plain(module):
            return self._product(x, module.weight.detach(), None if module.bias is None else module.bias.detach())
        applied: Tensor = module(x)
        return applied


def is_plain(module: nn.Module) -> bool:
    """Return True for a linear layer that only computes its product."""
    hooked = module._forward_pre_hooks or module._forward_hooks
    return type(module) in (nn.Linear, ProductLinear) and not hooked


def joined(layers: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Concatenate the weights of linear layers, and their biases if all have one."""
    has_bias = all(layer.bias is not None for layer in layers)
    return (
        side_by_side([layer.weight for layer in layers]),
        side_by_side([layer.bias for layer in layers]) if has_bias else None,
    )


@torch.no_grad()
def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Concatenate parameters along their first dimension and return the joined tensor, whose storage they share from
    now on.

    An optimizer step on the parameters then also changes the joined weight. Parameters that are already joined do not
    move; otherwise their data moves, and the parameters remain the same objects.
    """
    first = parameters[0]
    end, storage, are_joined = first.data_ptr(), first.untyped_storage().data_ptr(), True
    for parameter in parameters:
        follows = parameter.untyped_storage().data_ptr() == storage and parameter.data_ptr() == end
        are_joined &= follows and parameter.is_contiguous() and parameter.shape[1:] == first.shape[1:]
        end += parameter.numel() * parameter.element_size()
    if are_joined:
        rows = sum(len(parameter) for parameter in parameters)
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
    moved = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = moved[start : start + len(parameter)]
        start += len(parameter)
    return moved
