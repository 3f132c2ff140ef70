"""Experts without transformers' common forward: what a rank computes of Llama 4's and JetMoE's, with adapters too.

Llama 4   a copy of all tokens for each expert, times the router's scores ──up, gate, down──▶ a result for each copy
JetMoE    rows sorted by expert ──one product each──▶ rows

Shapes: T tokens, R rows, E experts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from braidrl.training.compute.cpu_layers import derived
from braidrl.training.compute.experts import DOWN, EXPERTS, SCALING, UP, ExpertProducts


class LocalExperts:
    """This rank's experts of a module, with plain tensors, for functions of experts."""

    def __init__(self, module: Any, count: int) -> None:
        self.module, self.num_experts = module, count

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        if isinstance(value, nn.ParameterDict):
            return {key: plain(factor) for key, factor in value.items()}
        return plain(value)


class GatedExperts(LocalExperts):
    """Gated experts with matrices (out, in), which lack the attributes of transformers' common forward."""

    has_gate, is_transposed, has_bias = True, False, False
    has_post_expert_norm = _is_expert_parallel = False

    def _apply_gate(self, states: Tensor) -> Tensor:
        gate, up = states.chunk(2, dim=-1)
        gated: Tensor = self.act_fn(gate) * up
        return gated


class TransposedExperts(GatedExperts):
    """The same with matrices (in, out)."""

    is_transposed = True

    @property
    def lora_A(self) -> dict[str, Tensor]:
        """Return the first factors (E, rank, in). As in peft, the module's are those of a matrix (out, in)."""
        return {name: factor.mT for name, factor in self.__getattr__(UP).items()}

    @property
    def lora_B(self) -> dict[str, Tensor]:
        """Return the second factors (E, out, rank)."""
        return {name: factor.mT for name, factor in self.__getattr__(DOWN).items()}


def plain(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def rows_of_experts(experts: Any, rows: Tensor, numbers: Tensor) -> Tensor:
    """Return each row (R, D) after the expert of its number, (R,)."""
    outputs: Tensor = ALL_EXPERTS_FUNCTIONS[EXPERTS](experts, rows, numbers[:, None], rows.new_ones((len(rows), 1)))
    return outputs


def copies_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Return the results (E·T, D) of Llama 4's experts with adapters for the copies (E·T, D)."""
    numbers = torch.arange(self.num_experts, device=hidden_states.device)
    tokens = len(hidden_states) // self.num_experts
    return rows_of_experts(TransposedExperts(self, self.num_experts), hidden_states, numbers.repeat_interleave(tokens))


def sorted_forward(self: Any, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
    """Return the products of rows (R, in) with JetMoE's adapted matrices; each expert has as many rows as
    `expert_size` says.
    """
    sizes = torch.as_tensor(expert_size, device=inputs.device)
    products = ExpertProducts(
        torch.arange(self.num_experts, device=inputs.device).repeat_interleave(sizes), self.num_experts
    )
    (name,) = getattr(self, DOWN)
    added = products(products(inputs, getattr(self, DOWN)[name]), getattr(self, UP)[name])
    return products(inputs, getattr(self, name)) + getattr(self, SCALING) * added


FORMS: dict[str, Callable[..., Tensor]] = {
    "JetMoeParallelExperts": sorted_forward,
    "Llama4TextExperts": copies_forward,
}
"""How experts with adapters are computed that are without transformers' common forward, by the name of their class."""


def takes_adapters(module: nn.Module) -> bool:
    """Return True for experts whose stacked matrices can have adapters."""
    return hasattr(module, "has_gate") or type(module).__name__ in FORMS


def prepare_for_adapters(module: Any) -> None:
    """Make experts without transformers' common forward compute their adapters, in place."""
    if not hasattr(module, "has_gate") and not hasattr(module, DOWN):
        kind: Any = type(module)
        module.__class__ = derived(kind, FORMS[kind.__name__])
