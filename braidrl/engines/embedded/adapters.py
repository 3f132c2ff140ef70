"""Several policies on one model: a step computes each token with the low-rank adapters of its policy.

    y = x Wᵀ + [p = k] · α/r · (x A_kᵀ) B_kᵀ        p: the token's policy, k: each policy that has a token in the step

The frozen weights W exist once. The adapters are the trainers' tensors, so that an update needs no copy.

Every adapter multiplies all tokens of a step, and a mask keeps those of its policy: products of a fixed shape give a
row the same bits in any batch. Compiled decoding multiplies once for all policies, with their factors concatenated.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from braidrl.errors import UserError
from braidrl.training.lora import Adapted, AdaptedStack, adapter_parts, plain_names
from braidrl.weights.collective import OfferedWeights
from braidrl.weights.file import WeightFile
from braidrl.weights.publisher import PolicyWeights

NO_POLICY = -1


class Factors(NamedTuple):
    """A layer's adapter: `down` (r, in), `up` (out, r), and the scale of their product."""

    down: Tensor
    up: Tensor
    scaling: float


class SideBySide(NamedTuple):
    """The adapters of all policies for layers computed as one: K columns over all adapter ranks."""

    down: Tensor
    """(K, in)."""
    up: Tensor
    """(out, K), scaled; zero where a column belongs to another layer."""
    policies: Tensor
    """(K,), the number of the policy of each column."""


class PolicyAdapters:
    """The adapters of several policies, by role, on one model without adapters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.numbers: dict[str, int] = {}
        """The number of each policy."""
        self.of_layer: dict[nn.Module, dict[int, Factors]] = {}
        """By layer, the factors of each policy that adapts it."""
        self.trained: dict[str, nn.Module] = {}
        """The modules of the policies."""
        self.changes = 0
        """How often the factors, or their values, have changed."""
        self._masks: dict[int, Tensor] = {}
        """For each policy with tokens in the present pass, which tokens (N,) are its own."""

    def add(self, role: str, trained: nn.Module) -> None:
        """Add the policy of a role, whose module has adapters on the same base. Raises UserError for another model."""
        number, self.trained[role] = self.numbers.setdefault(role, len(self.numbers)), trained
        modules = dict(self.model.named_modules())
        for name, tensor in plain_names(trained, trained.state_dict(keep_vars=True)).items():
            if isinstance(tensor, AdaptedStack):
                raise UserError(
                    f"rollout.shared_base: {role} adapts experts ({name}); remove it, or those lora.targets"
                )
            if not isinstance(tensor, Adapted):
                continue
            layer = modules.get(name.removesuffix(".weight"))
            if layer is None:
                raise UserError(f"roles.{role}: its model has an adapted layer {name}, which the other policies lack")
            if layer not in self.of_layer:
                self.of_layer[layer] = {}
                layer.register_forward_hook(self._added)
            self.of_layer[layer][number] = Factors(tensor.down, tensor.up, tensor.scaling)
        self.changes += 1

    def take(self, weights: PolicyWeights) -> None:
        """Copy the adapters of a policy that another process trains. Raises ValueError if of another model."""
        assert isinstance(weights.source, WeightFile | OfferedWeights)
        weights.source.put_into(adapter_parts(self.trained[weights.role]))

    @torch.no_grad()
    def side_by_side(self, layers: Sequence[Any]) -> SideBySide | None:
        """Return a copy of the adapters of layers that are computed as one; None if none is adapted."""
        first, start, downs, ups, numbers = layers[0].weight, 0, list[Tensor](), list[Tensor](), list[int]()
        width = sum(layer.out_features for layer in layers)
        for layer in layers:
            for number, factors in self.of_layer.get(layer, {}).items():
                up = first.new_zeros(width, len(factors.down))
                up[start : start + layer.out_features] = factors.up * factors.scaling
                ups.append(up)
                downs.append(factors.down.to(first.dtype))
                numbers += [number] * len(factors.down)
            start += layer.out_features
        return SideBySide(torch.cat(downs), torch.cat(ups, 1), torch.tensor(numbers)) if numbers else None

    def numbers_of(self, policies: Sequence[str | None]) -> Tensor:
        """Return the numbers of policies; None, for tokens without effect, becomes NO_POLICY."""
        return torch.tensor([NO_POLICY if role is None else self.numbers[role] for role in policies])

    @contextmanager
    def computing(self, policies: Sequence[str | None], lengths: Sequence[int], padding: int = 0) -> Iterator[None]:
        """Compute a pass over runs of tokens with these policies and lengths, in order, and `padding` more tokens.

        None marks tokens without effect.
        """
        numbers = self.numbers_of([*policies, None])
        of_token = numbers.repeat_interleave(torch.tensor([*lengths, padding])).to(next(self.model.parameters()).device)
        self._masks = {number: of_token == number for number in sorted({*numbers.tolist()} - {NO_POLICY})}
        try:
            yield
        finally:
            self._masks = {}

    def _added(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        read = inputs[0].reshape(-1, inputs[0].shape[-1])
        added = output.reshape(-1, output.shape[-1])
        for number, mask in self._masks.items():
            if (factors := self.of_layer[layer].get(number)) is not None:
                product = (read @ factors.down.to(read.dtype).T) @ factors.up.to(read.dtype).T
                added = added + (product * factors.scaling) * mask[:, None]
        return added.reshape(output.shape)


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a module's tensors by their names without adapters; adapted layers give their base weights."""
    named = plain_names(model, model.state_dict(keep_vars=True))
    of_linear = {name: value.layer.weight for name, value in named.items() if isinstance(value, Adapted)}
    of_experts = {name: value.weights for name, value in named.items() if isinstance(value, AdaptedStack)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)} | of_linear | of_experts


def share_weights(model: nn.Module, source: nn.Module) -> None:
    """Make frozen parameters of a model use the memory of equal-shaped tensors of the same names in `source`.

    Adapters of the source are not shared.
    """
    targets, sources = frozen_weights(model), frozen_weights(source)
    for name, target in targets.items():
        shared = sources.get(name)
        if shared is None or target.requires_grad or shared.requires_grad:
            continue
        if (target.shape, target.dtype, target.device) == (shared.shape, shared.dtype, shared.device):
            target.data = shared.data
