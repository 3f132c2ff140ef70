"""The experts of a mixture: tokens sorted by expert, and one matrix product for each expert over its slice of rows.

tokens (S) ──sort by expert──▶ | rows of expert 0 | rows of expert 1 | ... | ──up, gate, down──▶ weighted sums by token

On CUDA transformers' grouped products do the same in one kernel. On a CPU they loop over MKL's products, which are the
faster ones for the few rows of decoding, and they support no float64. Here each slice goes through `product`, which
also adds the bias.

Shapes: T tokens, K experts of a token, S = T·K rows, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from braidrl.native.linear import product

EXPERTS = "braid"
"""The name of this implementation of experts in transformers."""
MANY = 32
"""From this many rows per expert on, `product` is faster than grouped products.

With gradients it always takes two thirds of the time.
"""


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sums (T, D) of the experts `top_k_index` (T, K) of tokens (T, D); `self` is transformers'
    module.
    """
    many = hidden_states.is_cpu and (torch.is_grad_enabled() or top_k_index.numel() >= MANY * self.num_experts)
    # On the meta device grouped products take bfloat16 alone.
    counted = many or hidden_states.dtype is torch.float64
    if hidden_states.dtype is torch.bfloat16 if hidden_states.is_meta else not counted:
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    if not len(hidden_states):
        return hidden_states
    chosen, each = top_k_index.reshape(-1), top_k_index.shape[-1]
    order = chosen.argsort(stable=True)
    if hidden_states.is_meta:
        counts = [len(part) for part in chosen.tensor_split(self.num_experts)]
    else:
        counts = chosen.bincount(minlength=self.num_experts).tolist()

    def multiplied(rows: Tensor, name: str) -> Tensor:
        weights = getattr(self, name).unbind()
        biases = getattr(self, f"{name}_bias").unbind() if self.has_bias else [None] * self.num_experts
        parts = zip(rows.split(counts), weights, biases, strict=True)
        return torch.cat(
            [
                product(part, weight.t() if self.is_transposed else weight, bias)
                for part, weight, bias in parts
                if len(part)
            ]
        )

    states = multiplied(hidden_states[order // each], "gate_up_proj" if self.has_gate else "up_proj")
    states = multiplied(self._apply_gate(states) if self.has_gate else self.act_fn(states), "down_proj")
    weighted = states * top_k_weights.reshape(-1)[order, None]
    summed = weighted[order.argsort()].view(*top_k_index.shape, -1).sum(1)
    return summed.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
