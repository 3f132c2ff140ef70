"""The experts of a mixture: tokens sorted by expert, and one matrix product for each expert over its slice of rows.

tokens (S) ──sort by expert──▶ | rows of expert 0 | rows of expert 1 | ... | ──up, gate, down──▶ weighted sums by token

On CUDA transformers' grouped products do the same in one kernel. On a CPU they loop over MKL's products, whose bits
depend on the number of rows, and they support no float64. Here each slice goes through `product`, which also adds the
bias, or without gradients through `row_product`, where this processor has it. With gradients an expert's rows pass all
steps before those of the next one, so that they stay in the processor's cache (`_Experts`).

An adapter of stacked matrices has factors for each expert, and its products go over the same slices:

    rows of expert e    y = x W_eᵀ + α/r · (x A_eᵀ) B_eᵀ

Shapes: T tokens, K experts of a token, S = T·K rows, E experts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear, grouped_mm_experts_forward

from braidrl.native.building import in_memory
from braidrl.native.linear import has_row_product, product, product_into, row_product, weight_gradient_into
from braidrl.training.compute.cpu_layers import fits, gate_of_experts, scaled_gate_gradients

EXPERTS = "braid"
"""The name of this implementation of experts in transformers."""
MANY = 32
"""From this many rows per expert on, `product` is faster than grouped products.

With gradients it always takes two thirds of the time.
"""
DOWN, UP, SCALING = "lora_A", "lora_B", "lora_scaling"
"""Attributes of a module of experts with adapters: their factors (E, rank, in) and (E, out, rank) by the name of the
adapted matrices, and the scale.
"""


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sums (T, D) of the experts `top_k_index` (T, K) of tokens (T, D); `self` is transformers'
    module, possibly with adapters.
    """
    downs, ups = getattr(self, DOWN, {}), getattr(self, UP, {})
    has_many_rows = hidden_states.is_cpu and (torch.is_grad_enabled() or top_k_index.numel() >= MANY * self.num_experts)
    exact = is_batch_invariant(self, hidden_states)
    # On the meta device grouped products support only bfloat16.
    counted = exact or has_many_rows or hidden_states.dtype is torch.float64
    is_plain = hidden_states.dtype is torch.bfloat16 if hidden_states.is_meta else not counted
    if is_plain and not downs:
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    if not len(hidden_states):
        return hidden_states
    sorting = Sorting.of(top_k_index)
    experts = top_k_index.reshape(-1)[sorting.order]
    products = ExpertProducts(experts, self.num_experts, row_product if exact else product)
    if hidden_states.is_cpu and torch.is_grad_enabled() and is_of_matrices(self) and not downs:
        return in_turn(self, hidden_states, top_k_weights, sorting, products.counts.tolist())

    def multiplied(rows: Tensor, name: str) -> Tensor:
        weights, biases = getattr(self, name), getattr(self, f"{name}_bias") if self.has_bias else None
        result = products(rows, weights.mT if self.is_transposed else weights, biases)
        if name in downs:
            result = result + getattr(self, SCALING) * products(products(rows, downs[name]), ups[name])
        return result

    states = multiplied(sorting.rows_of(hidden_states), "gate_up_proj" if self.has_gate else "up_proj")
    states = multiplied(self._apply_gate(states) if self.has_gate else self.act_fn(states), "down_proj")
    if getattr(self, "has_post_expert_norm", False):
        states = self.post_expert_norm(states)
    return sorting.summed(states, top_k_weights).to(hidden_states.dtype)


def is_batch_invariant(experts: Any, states: Tensor) -> bool:
    """Return True if no gradient is needed and a kernel gives a row the same bits in any batch."""
    if torch.is_grad_enabled() or not states.is_cpu or experts.is_transposed:
        return False
    return in_memory(states, experts.down_proj) and has_row_product(states.dtype)


def is_of_matrices(experts: Any) -> bool:
    """Return True for experts whose only parameters are the matrices and biases of two products."""
    names = {name for name, _ in experts.named_parameters()}
    return names <= {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}


def in_turn(experts: Any, states: Tensor, weights: Tensor, sorting: "Sorting", sizes: list[int]) -> Tensor:
    """Return the weighted sums (T, D) of tokens (T, D) by weights (T, K), one expert after the other."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    matrices: list[Tensor | None] = []
    for name in (first, "down_proj"):
        matrix = getattr(experts, name)
        matrices += [
            matrix.mT if experts.is_transposed else matrix,
            getattr(experts, f"{name}_bias") if experts.has_bias else None,
        ]
    activate = experts._apply_gate if experts.has_gate else experts.act_fn
    sums: Tensor = _Experts.apply(states, weights, *matrices, activate, sorting, sizes)
    return sums


@dataclass(frozen=True)
class Sorting:
    """The order of S = T·K rows by expert: each token has K of them."""

    order: Tensor
    """The number t·K + k of each sorted row, (S,)."""
    positions: Tensor
    """The position of each row among the sorted ones, (S,)."""
    experts_per_token: int
    """K."""

    @staticmethod
    def of(top_k_index: Tensor) -> "Sorting":
        """Sort the rows of the experts (T, K)."""
        order = top_k_index.reshape(-1).argsort(stable=True)
        positions = torch.empty_like(order)
        positions[order] = torch.arange(len(order), device=order.device)
        return Sorting(order, positions, top_k_index.shape[-1])

    def rows_of(self, states: Tensor) -> Tensor:
        """Return each row's token, (S, D), from tokens (T, D)."""
        rows: Tensor = _SortedRows.apply(states, self)
        return rows

    def summed(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return each token's sum (T, D) of its rows among the sorted ones (S, D), by weights (T, K)."""
        sums: Tensor = _WeightedSums.apply(rows, weights, self)
        return sums


class _Experts(torch.autograd.Function):
    """Sums of each token's experts. Only the first product's results are kept for the backward pass.

    With y = W a + b of a row with weight w, and the gradient g of its token's sum: ∂w = gᵀy = (Wᵀg)ᵀa + gᵀb.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weights: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        activate: Callable[[Tensor], Tensor],
        sorting: Sorting,
        sizes: list[int],
    ) -> Tensor:
        scales = weights.reshape(-1, 1).index_select(0, sorting.order)
        inner, sums = states.new_empty((len(scales), up.shape[1])), accumulator(states)
        for expert, rows, tokens in slices(sorting, sizes):
            product_into(inner[rows], states.index_select(0, tokens), up[expert], bias_of(up_bias, expert))
            outputs = product(activate(inner[rows]), down[expert], bias_of(down_bias, expert)) * scales[rows]
            sums.index_add_(0, tokens, outputs.to(sums.dtype))
        ctx.save_for_backward(states, scales, up, up_bias, down, down_bias, inner)
        ctx.activate, ctx.sorting, ctx.sizes, ctx.weights = activate, sorting, sizes, weights.shape
        return sums.to(states.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, scales, up, up_bias, down, down_bias, inner = ctx.saved_tensors
        (gradient,), (of_states, of_weights, *of_matrices) = gradients, ctx.needs_input_grad[:6]
        to_states, to_scales = accumulator(states) if of_states else None, torch.zeros_like(scales)
        to_up, to_up_bias, to_down, to_down_bias = to_matrices = [
            torch.empty_like(matrix, memory_format=torch.contiguous_format) if needed else None
            for matrix, needed in zip((up, up_bias, down, down_bias), of_matrices, strict=True)
        ]
        for expert in [number for number, size in enumerate(ctx.sizes) if not size]:
            for stack in to_matrices:
                if stack is not None:
                    stack[expert].zero_()
        for expert, rows, tokens in slices(ctx.sorting, ctx.sizes):
            to_outputs = gradient.index_select(0, tokens)
            to_active, scale = product(to_outputs, down[expert].t()), scales[rows]
            scaled, to_inner, values = activation_gradients(ctx.activate, inner[rows], scale, to_active)
            if of_weights:
                values = values if down_bias is None else values + to_outputs @ down_bias[expert]
                to_scales[rows] = values[:, None].to(scales.dtype)
            if to_down is not None:
                weight_gradient_into(to_down[expert], to_outputs, scaled.to(to_outputs.dtype))
            if to_down_bias is not None:
                to_down_bias[expert] = (to_outputs * scale).sum(0)
            if to_up is not None:
                weight_gradient_into(to_up[expert], to_inner, states.index_select(0, tokens))
            if to_up_bias is not None:
                to_up_bias[expert] = to_inner.sum(0)
            if to_states is not None:
                to_states.index_add_(0, tokens, product(to_inner, up[expert].t()).to(to_states.dtype))
        to_weights = to_scales.index_select(0, ctx.sorting.positions).view(ctx.weights) if of_weights else None
        summed = None if to_states is None else to_states.to(states.dtype)
        return summed, to_weights, to_up, to_up_bias, to_down, to_down_bias, None, None, None


def activation_gradients(
    activate: Callable[[Tensor], Tensor], states: Tensor, scales: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales (S, 1) · y, (S, I), for rows y = activate(states); and from the gradient (S, I) of that product the
    gradients of the states and of the scales, (S,).
    """
    if getattr(activate, "__func__", None) is gate_of_experts and fits(states, scales, gradient):
        return scaled_gate_gradients(states, scales, gradient)
    with torch.enable_grad():
        states = states.detach().requires_grad_()
        active = activate(states)
    (to_states,) = torch.autograd.grad(active, states, (gradient * scales).to(active.dtype))
    return active.detach() * scales, to_states, torch.linalg.vecdot(gradient, active.detach())


def slices(sorting: Sorting, sizes: list[int]) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield each expert that has rows, with their slice among the sorted ones and their tokens."""
    start = 0
    for expert, tokens in enumerate((sorting.order // sorting.experts_per_token).split(sizes)):
        if len(tokens):
            yield expert, slice(start, start + len(tokens)), tokens
        start += len(tokens)


def accumulator(states: Tensor) -> Tensor:
    """Return zeros to which rows of half precision are added without rounding each sum to it."""
    return torch.zeros_like(states, dtype=torch.promote_types(states.dtype, torch.float32))


def bias_of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]


class _SortedRows(torch.autograd.Function):
    """Rows of tokens; the gradient of a token is the sum of its K rows', read in place of added row by row."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, sorting: Sorting) -> Tensor:
        ctx.sorting = sorting
        return states.index_select(0, sorting.order // sorting.experts_per_token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rows = gradients[0].index_select(0, ctx.sorting.positions)
        return rows.view(-1, ctx.sorting.experts_per_token, rows.shape[-1]).sum(1), None


class _WeightedSums(torch.autograd.Function):
    """Sums of K rows of each token by weights, without a copy of the weighted rows for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, sorting: Sorting) -> Tensor:
        ctx.sorting = sorting
        ctx.save_for_backward(rows, weights)
        return (by_token(rows, sorting) * weights[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,), (rows, weights), sorting = gradients, ctx.saved_tensors, ctx.sorting
        of_rows = of_weights = None
        if ctx.needs_input_grad[0]:
            scales = weights.reshape(-1).index_select(0, sorting.order)[:, None]
            of_rows = (gradient.index_select(0, sorting.order // sorting.experts_per_token) * scales).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            of_weights = (by_token(rows, sorting) * gradient[:, None]).sum(-1).to(weights.dtype)
        return of_rows, of_weights, None


def by_token(rows: Tensor, sorting: Sorting) -> Tensor:
    """Return sorted rows (S, D) by token, (T, K, D)."""
    return rows.index_select(0, sorting.positions).view(-1, sorting.experts_per_token, rows.shape[-1])


class ExpertProducts:
    """Products of sorted rows (S, in) with a matrix for each expert, over its slice of the rows."""

    def __init__(self, chosen: Tensor, experts: int, multiply: Callable[..., Tensor] = product) -> None:
        """Find the slices of rows whose experts are `chosen` (S,), in ascending order; `multiply` is called as
        `product`.
        """
        self.multiply = multiply
        if chosen.is_meta:
            self.counts = torch.tensor([len(part) for part in chosen.tensor_split(experts)])
        else:
            self.counts = torch.searchsorted(chosen, torch.arange(experts, device=chosen.device), right=True)
            self.counts = self.counts.diff(prepend=self.counts.new_zeros(1))
        self.sizes = None if chosen.is_cuda else self.counts.tolist()

    def __call__(self, rows: Tensor, weights: Tensor, biases: Tensor | None = None) -> Tensor:
        """Return rows (S, in) by weights (E, out, in), plus biases (E, out)."""
        if self.sizes is None and rows.dtype is not torch.float64:
            # One grouped product, where shapes allow it.
            biases_of_rows = None if biases is None else biases.repeat_interleave(self.counts, 0, output_size=len(rows))
            return _grouped_linear(
                rows, weights.mT, self.counts.cumsum(0, dtype=torch.int32), biases_of_rows, is_transposed=True
            )
        parts = zip(
            rows.split(self.sizes or self.counts.tolist()),
            weights.unbind(),
            [None] * len(weights) if biases is None else biases.unbind(),
            strict=True,
        )
        return torch.cat([self.multiply(part, weight, bias) for part, weight, bias in parts if len(part)])


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
