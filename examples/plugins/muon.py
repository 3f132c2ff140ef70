"""A user-defined optimizer that needs whole matrices: Muon (Jordan et al., 2024), with the step size of Moonlight (Liu
et al., 2025, arXiv 2502.16982), so that it takes AdamW's learning rate.

    matrices (out, in), stacks of them (experts, out, in)     momentum, orthogonalised by Newton-Schulz
    embedding, output layer, vectors                          AdamW
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from braidrl.weights.shards import local_shard, shard_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
VOCABULARY = ("embed", "wte", "lm_head", "score")
"""Parts of the names of matrices that AdamW updates."""


class Muon(torch.optim.Optimizer):
    """An optimizer chosen by `trainer.optimizer: examples/plugins/muon.py:Muon`."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rounds: int = 5,
    ) -> None:
        named = list(parameters)
        matrices = {name for name, p in named if p.dim() > 1 and not any(part in name for part in VOCABULARY)}
        groups: list[dict[str, Any]] = [
            {"params": [pair for pair in named if (pair[0] in matrices) == chosen], "orthogonal": chosen}
            for chosen in (True, False)
        ]
        settings = {"momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rounds": rounds}
        super().__init__([group for group in groups if group["params"]], {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            update = self._orthogonal if group["orthogonal"] else self._adamw
            for weights in group["params"]:
                if weights.grad is not None:
                    weights.mul_(1 - group["lr"] * group["weight_decay"])
                    update(weights, group)

    def _orthogonal(self, weights: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[weights], weights.grad
        moment = state.setdefault("momentum", torch.zeros_like(weights)).lerp_(gradient, 1 - group["momentum"])
        direction = newton_schulz(whole_matrices(torch.lerp(gradient, moment, group["momentum"])), group["rounds"])
        # The root mean square of an orthogonal matrix times this is 0.2, as of AdamW's steps.
        scale = 0.2 * max(weights.shape[-2:]) ** 0.5
        own = direction if holds_matrices(weights) else shard_of(direction, weights)
        local_shard(weights).sub_(own, alpha=group["lr"] * scale)

    def _adamw(self, weights: Tensor, group: dict[str, Any]) -> None:
        state, (fast, slow) = self.state[weights], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weights), torch.zeros_like(weights)
        state["step"] += 1
        moment = state["exp_avg"].lerp_(weights.grad, 1 - fast)
        square = state["exp_avg_sq"].lerp_(weights.grad * weights.grad, 1 - slow)
        step = float(state["step"])
        root = (square / (1 - slow**step)).sqrt() + group["eps"]
        weights.sub_(moment / (1 - fast**step) / root, alpha=group["lr"])


def holds_matrices(tensor: Tensor) -> bool:
    """Return whether a rank holds whole matrices: the tensor is not sharded, or is a stack that is sharded by its first
    dimension.
    """
    if not isinstance(tensor, DTensor):
        return True
    return all(
        p.is_replicate() or (tensor.dim() > 2 and isinstance(p, Shard) and p.dim == 0) for p in tensor.placements
    )


def whole_matrices(tensor: Tensor) -> Tensor:
    """Return this rank's matrices of a stack, or the gathered tensor; all ranks that shard it call this together."""
    return local_shard(tensor) if holds_matrices(tensor) or not isinstance(tensor, DTensor) else tensor.full_tensor()


def newton_schulz(matrices: Tensor, rounds: int) -> Tensor:
    """Return U Vᵀ of U S Vᵀ (..., out, in), about: singular values between 0.7 and 1.2; bfloat16 on CUDA."""
    a, b, c = COEFFICIENTS
    turned = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if turned else matrices
    x = x.bfloat16() if x.is_cuda else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if turned else x).to(matrices.dtype)
