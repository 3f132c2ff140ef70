"""One decode step of a Llama-like model on the CPU by compiled kernels; matrix products are compiled too, or by torch
on processors that multiply bfloat16.

token ─▶ [norm ─▶ q k v ─▶ rotate, store, attend ─▶ o ─▶ add, norm ─▶ gate up ─▶ silu · ─▶ down] × layers ─▶ norm
    ─▶ logits ─▶ draw

In a mixture one kernel computes all experts of a layer; the router is the model's module. If several policies share
the weights, a product is followed by that of their adapters. A step reads one or several tokens of each row. Each token
reads the keys of its slot up to its position, so a long row does not slow down others. The residual stream is float32
for weights of any dtype.

Shapes: B tokens in the step, W width, H query heads, K key heads, D head width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from braidrl.data.token_columns import LOG_PROBS
from braidrl.engines.embedded.adapters import PolicyAdapters, SideBySide
from braidrl.engines.embedded.sharded_decoding import SendHidden
from braidrl.engines.embedded.slot_states import ROW_MULTIPLE, SlotStates
from braidrl.native.building import address, library
from braidrl.native.linear import (
    ProductLinear,
    gated_experts,
    has_row_product,
    packed,
    packed_bytes,
    product,
    row_product,
)
from braidrl.training.compute.slots import SlotCache
from braidrl.training.decoders.body import decoder_of
from braidrl.training.lora import is_adapter
from braidrl.training.parallel.pipeline import local_layers

BLOCK = 128


class Kernels:
    """Compiled kernels for one head width, a number of query heads per key head and one dtype: float32 or bfloat16."""

    def __init__(self, functions: Any, dtype: torch.dtype) -> None:
        self.dtype, self._functions = dtype, functions

    def add_norm(self, residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        """Add `update` (B, W) to `residual` (B, W) float32 in place, and return its RMS norm times `weight` (W,), (B,
        W).
        """
        out = torch.empty(residual.shape, dtype=self.dtype)
        self._functions.add_norm(
            address(residual, torch.float32),
            None if update is None else address(update, self.dtype),
            address(weight, self.dtype),
            address(out, self.dtype),
            *residual.shape,
            epsilon,
            torch.get_num_threads(),
        )
        return out

    def gated(self, both: Tensor) -> Tensor:
        """Return silu(first half) · second half of `both` (B, 2W), (B, W)."""
        out = torch.empty((len(both), both.shape[1] // 2), dtype=self.dtype)
        self._functions.gated(address(both, self.dtype), address(out, self.dtype), *out.shape, torch.get_num_threads())
        return out

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
    ) -> Tensor:
        """Attend with B new tokens, given their projections; returns (B, H · D). Raises MemoryError.

        Args:
            projected: (B, (H + 2K) · D).
            norms: The weights (D,) of the RMS norms of queries and keys.
            epsilon: The epsilon of these norms.
            angles: Cosines and sines (B, D) float32.
            slots: (B,) int64; the output of a token without a slot, -1, is 0.
            positions: (B,) int64, ascending for the tokens of a slot.
            keys: (slots, K, capacity, D), written at `positions`.
            values: The same shape, written at `positions`.
            window: Number of earlier positions that a query attends to.
            scaling: The factor of the scores.
        """
        rows, (_, key_heads, capacity, width) = len(projected), keys.shape
        out = torch.empty((rows, projected.shape[1] - 2 * key_heads * width), dtype=self.dtype)
        done = self._functions.attend(
            address(projected, self.dtype),
            *([address(n, self.dtype) for n in norms] if norms else [None, None]),
            epsilon,
            *(address(angle, torch.float32) for angle in angles),
            address(slots, torch.int64),
            address(positions, torch.int64),
            address(keys, self.dtype),
            address(values, self.dtype),
            address(out, self.dtype),
            rows,
            key_heads,
            capacity,
            window or 0,
            scaling,
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError("no memory for the scores of a decode step")
        return out

    def keep(
        self, read: Tensor, starts: Tensor, slots: Tensor, drawn: Tensor, log_probs: Tensor, states: SlotStates
    ) -> tuple[Tensor, Tensor]:
        """Append the drawn tokens of a step to its rows' states, up to the first wrong guess; return the masks of kept
        tokens (B,) and ended rows (R,).

        Mark which tokens (B,) count, and which rows (R,) have ended.

        Args:
            read: (B,), tokens starts[r] to starts[r + 1] are the current token of row r and guesses of its next ones.
            starts: (R + 1,).
            slots: (R,), the rows' slots.
            drawn: (B,), the token that was drawn behind each.
            log_probs: (B,) float32, of `drawn`.
            states: All slots' states; columns other than log-probs are unchanged.
        """
        kept, ended = torch.zeros(len(read), dtype=torch.bool), torch.zeros(len(slots), dtype=torch.bool)
        slot_log_probs = states.per_token[LOG_PROBS]
        self._functions.keep(
            *(address(integers, torch.int64) for integers in (read, starts, slots, drawn)),
            address(log_probs, torch.float32),
            address(states.tokens, torch.int64),
            address(slot_log_probs, torch.float32),
            *(
                address(integers, torch.int64)
                for integers in (states.current, states.position, states.drawn, states.limit)
            ),
            address(states.stop_token_ids, torch.int64),
            address(kept, torch.bool),
            address(ended, torch.bool),
            len(slots),
            states.tokens.shape[1],
            states.stop_token_ids.shape[1],
        )
        return kept, ended

    def draw(
        self, logits: Tensor, temperatures: Tensor | None, greedy: Tensor | None, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw tokens (B,) from logits (B, V) by `uniforms` (B,) float64, or the likeliest; return them with log-probs
        (B,) float32.
        """
        rows, vocabulary = logits.shape
        temperatures = torch.ones(rows, dtype=torch.float64) if temperatures is None else temperatures
        greedy = torch.zeros(rows, dtype=torch.bool) if greedy is None else greedy
        tokens, log_probs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        sums = torch.empty((rows, -(-vocabulary // BLOCK)), dtype=torch.float64)
        self._functions.draw(
            address(logits, self.dtype),
            address(temperatures, torch.float64),
            address(greedy, torch.bool),
            address(uniforms, torch.float64),
            address(tokens, torch.int64),
            address(log_probs, torch.float32),
            address(sums, torch.float64),
            rows,
            vocabulary,
            torch.get_num_threads(),
        )
        return tokens, log_probs


FAMILIES = {"qwen2", "qwen3", "llama", "qwen3_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}
"""Types of text models. Behind a prompt all axes of a token's position are equal, and a rope of several is one."""


def native_decoder(model: PreTrainedModel, adapters: PolicyAdapters | None = None) -> "NativeDecoder | None":
    """Return a compiled decoder, with `adapters` of several policies.

    Returns None if the kernels do not support the model or no compiler works.
    """
    config: Any = model.config.get_text_config()
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return None
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        return None
    # Products must give a row the same bits for any number of rows: an expert may have one row or all.
    mixtures = [layer.mlp for layer in local_layers(model) if hasattr(layer.mlp, "experts")]
    if mixtures and not (has_row_product(model.dtype) and all(is_undivided(mixture) for mixture in mixtures)):
        return None
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    functions = library("decode", model.dtype, HEAD=width, GROUP=group)
    return None if functions is None else NativeDecoder(model, Kernels(functions, model.dtype), width, adapters)


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

    router: nn.Module
    """Called as a module, because it may record routes."""
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


class NativeDecoder:
    """A decoder that reads the weights of `model` in place; see `native_decoder` for the supported models."""

    def __init__(
        self, model: PreTrainedModel, kernels: Kernels, width: int, adapters: PolicyAdapters | None = None
    ) -> None:
        config: Any = model.config.get_text_config()
        self._model, self._epsilon, self.kernels = model, float(config.rms_norm_eps), kernels
        self._adapters = adapters
        self._side_by_side: dict[tuple[nn.Module, ...], SideBySide | None] = {}
        """Copies of the policies' adapters by the layers that a product is for, as of the change `_adapter_changes`."""
        self._adapter_changes = -1
        self._policies: Tensor | None = None
        """The number of the policy of each token in this step."""
        self._by_row = has_row_product(model.dtype)
        self.row_multiple = 4 if self._by_row else ROW_MULTIPLE
        """Tokens of a step are a multiple of this: few sizes of steps, or what gives a row the same bits."""
        self._panels: dict[int, Tensor] = {}
        """Each matrix in the order in which the product reads it, by its address."""
        self._as_of: list[tuple[int, int]] = []
        """Addresses and versions of the weights that were looked up and packed."""
        weighted = *local_layers(model), model.get_output_embeddings() or nn.Identity()
        self._modules = [module for part in weighted for module in part.modules() if module._parameters]
        self._cached = config.num_key_value_heads, (width, width)
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
                matrices += [layer.mlp.gate_up, layer.mlp.down]
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
        filler = -len(x) % ROW_MULTIPLE
        padded = nn.functional.pad(x, (0, 0, 0, filler)) if filler else x
        _, weights, chosen = mixture.router(padded)
        weights, chosen = weights[: len(x)].to(x.dtype), chosen[: len(x)]
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
