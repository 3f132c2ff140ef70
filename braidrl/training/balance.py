"""Balance of a mixture's experts: losses of its routers per token, the selection bias, and metrics by layer.

routers ──logits, routes──▶ predictions ──observe──▶ losses per action token   added to the objective's
                                             ╰──▶ counts of choices ──step──▶ metrics, selection bias

Losses are numbers per action token, as the policy's are: the objective weights them, and their sums are divided once by
the global count. A micro-batch has complete rows, so that packing does not change them.

Shapes: A action tokens, B rows, L layers with a router, E experts, k experts of a token.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.config.training import BalanceConfig
from braidrl.errors import UserError
from braidrl.observe.metrics import Sums
from braidrl.training.decoders.routing import LAYER, Routing, experts_of, layer_of, routers_of, use_routing
from braidrl.training.objective import ROUTER_LOSS
from braidrl.training.parallel.layouts import DataParallel

LOGITS, SCORES, ROUTES, CHANGED = "router_logits", "router_scores", "routes", "routes_changed"
"""Names of predictions: the routers' logits and normalised scores (A, L, E), the experts used, (A, L, k), and under a
replay the share of them that the routers would not have chosen, (A, L).
"""
BIAS = "e_score_correction_bias"
"""Name of the buffer (E,) that transformers adds to the scores to select experts, and not to weight them."""


def router_predictions(routing: Routing, positions: Tensor) -> dict[str, Tensor]:
    """Return router logits, scores and routes of the tokens at `positions` (A,) in a watched forward pass; empty
    without routers.
    """
    if not routing.logits:
        return {}
    logits = routing.of_all_tokens(routing.logits)[positions]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.softmax(-1)
    if routing.is_sigmoid:
        scores = logits.sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
    predictions = {LOGITS: logits, SCORES: scores, ROUTES: routing.recorded()[positions]}
    if routing.changed:
        predictions[CHANGED] = routing.of_all_tokens(routing.changed)[positions].detach()
    return predictions


def choices(routes: Tensor, experts: int) -> Tensor:
    """Return how often each token chose each expert, (A, L, E) of 0 and 1."""
    return torch.zeros(*routes.shape[:2], experts, device=routes.device).scatter_(-1, routes, 1.0)


def auxiliary_loss(scores: Tensor, shares: Tensor) -> Tensor:
    """Return each token's part of the auxiliary loss (A,), whose mean is Σ_l E Σ_e f_e P_e.

    `shares` (A or 1, L, E) are f_e, the share of the choices that went to expert e, without gradient; P_e is the mean
    of the scores (A, L, E). DeepSeek-AI 2024, "DeepSeek-V3", equations 17-20.
    """
    return scores.shape[-1] * (shares.to(scores) * scores).sum((-1, -2))


def row_shares(routes: Tensor, experts: int, offsets: Tensor) -> Tensor:
    """Return each expert's share of the choices in each token's row, (A, L, E); `offsets` (B + 1,) are the starts of
    the rows' action tokens.
    """
    lengths = offsets.diff()
    rows = torch.arange(len(lengths)).repeat_interleave(lengths).to(routes.device)
    chosen = choices(routes, experts).double()
    counts = chosen.new_zeros(len(lengths), *chosen.shape[1:]).index_add_(0, rows, chosen)
    return (counts / counts.sum(-1, keepdim=True).clamp(min=1))[rows]


def z_loss(logits: Tensor) -> Tensor:
    """Return Σ_l (log Σ_e exp(logit))² of each token, (A,). Zoph et al. 2022, "ST-MoE", equation 5."""
    return logits.logsumexp(-1).square().sum(-1)


class RouterBalance:
    """The routers of a trained model, whose choices are counted over an optimizer step."""

    def __init__(self, model: Any, config: BalanceConfig, ranks: DataParallel) -> None:
        """Prepare the model's routers in place. Raises UserError for a model that does not support the settings."""
        self.config, self.ranks, self.model = config, ranks, model
        layers, experts = use_routing(model), experts_of(model)
        names = {id(module): name for name, module in model.named_modules()}
        routers = routers_of(model)
        self.frozen = {
            f"{names[id(router)]}.{name}"
            for router in routers
            if config.frozen
            for name, parameter in router.named_parameters()
            if parameter.dim() <= 2 and len(parameter) == experts and "experts" not in name.split(".")
        }
        """Names of the parameters that stay as they are."""
        if config.bias and len(self.biases()) != layers:
            raise UserError(
                f"trainer.balance.bias: {type(model).__name__} has no selection bias; write trainer.balance.auxiliary"
            )
        self.counts = torch.zeros(layers, experts, dtype=torch.float64)
        """How often this process's tokens chose each expert since the last optimizer step, by layer of the model."""
        self.shares = torch.full_like(self.counts, 1 / experts)
        """Each expert's share of the choices of all ranks in the last optimizer step; equal ones before the first."""

    def biases(self) -> list[tuple[str, int, Tensor]]:
        """Return the selection biases of this rank's routers: name in the model, layer, and values (E,)."""
        return [
            (f"{name}.{leaf}", layer_of(module), bias)
            for name, module in self.model.named_modules()
            if self.config.bias and hasattr(module, LAYER)
            for leaf, bias in module.named_buffers()
            if leaf.endswith(BIAS)
        ]

    def observe(self, predicted: Mapping[str, Tensor], offsets: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Count a micro-batch's choices; return its predictions with the routers' losses in place of their outputs, and
        metrics per token (A,).

        A pipeline rank returns those of its layers.
        """
        outputs = dict(predicted)
        if LOGITS not in outputs:
            return outputs, {}
        logits, scores, routes = outputs.pop(LOGITS), outputs.pop(SCORES), outputs.pop(ROUTES)
        layers = [layer_of(router) for router in routers_of(self.model)]
        if self.ranks.is_first_of_stage:
            self.counts[layers] += choices(routes, scores.shape[-1]).sum(0).to(self.counts)
        losses = {}
        if self.config.auxiliary:
            shares = self.shares[None, layers]
            if self.config.shares == "row":
                shares = row_shares(routes, scores.shape[-1], offsets)
            losses["router_auxiliary"] = auxiliary_loss(scores, shares)
            outputs[ROUTER_LOSS] = self.config.auxiliary * losses["router_auxiliary"]
        if self.config.z:
            losses["router_z"] = z_loss(logits)
            outputs[ROUTER_LOSS] = outputs.get(ROUTER_LOSS, 0) + self.config.z * losses["router_z"]
        entropies = torch.special.entr(scores.detach()).sum(-1).unbind(1)
        metrics = {f"router_entropy/{layer}": entropy for layer, entropy in zip(layers, entropies, strict=True)}
        if (changed := outputs.pop(CHANGED, None)) is not None:
            of_layers = zip(layers, changed.unbind(1), strict=True)
            metrics |= {f"routes_changed/{layer}": share for layer, share in of_layers}
        return outputs, metrics | {name: loss.detach() for name, loss in losses.items()}

    def report(self, sums: Sums, role: str, metrics: Mapping[str, Tensor]) -> None:
        """Add a micro-batch's metrics, on one rank of each pipeline stage. Losses are sums over all layers, whose
        tokens the last stage counts.
        """
        of_layers = {name: values for name, values in metrics.items() if "/" in name}
        if self.ranks.is_first_of_stage:
            sums.add_per_token(role, of_layers)
            losses = {name: values for name, values in metrics.items() if name not in of_layers}
            sums.add_per_token(role, losses, counted=self.ranks.is_reporting_rank)

    @torch.no_grad()
    def step(self, is_updated: bool) -> dict[str, float]:
        """End an optimizer step: add its loads to the selection bias; return the busiest expert's load by layer, 1 if
        all are equal.
        """
        if self.ranks.size > 1:
            with self.ranks.meeting("all-reduce of expert loads"):
                dist.all_reduce(self.counts, group=self.ranks.group)
        counts, self.counts = self.counts, torch.zeros_like(self.counts)
        if not is_updated or not counts.sum():
            return {}
        self.shares = counts / counts.sum(-1, keepdim=True)
        for _, layer, bias in self.biases():
            bias += self.config.bias * (counts[layer].mean() - counts[layer]).sign().to(bias)
        loads = (counts.amax(-1) / counts.mean(-1)).tolist()
        return {f"busiest_expert/{layer}": load for layer, load in enumerate(loads)}

    def state(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint stores beside the model; empty if the next step does not need it."""
        return {"shares": self.shares} if self.config.auxiliary and self.config.shares == "batch" else {}

    @torch.no_grad()
    def load(self, files: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Restore the selection biases of a checkpoint from `files` of its model, and its `state`, if it has one."""
        for name, _, bias in self.biases():
            bias.copy_(files[name])
        if "shares" in state:
            self.shares = state["shares"]
