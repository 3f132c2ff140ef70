"""The experts that a mixture's routers choose: recorded while an engine generates, and replayed while a trainer
computes.

hidden states ──router──▶ scores ──top-k──▶ chosen experts ──▶ Routing.chosen        recorded ▲ Routing.given ──────╯ in
place of the largest scores                  replayed  Engine and trainer round differently, so that their routers
choose other experts for some tokens. A replay takes the experts from the engine and their weights from the current
scores: the router keeps its gradient, even for experts that it would not choose now.

Routers are found by structure: modules of the layers whose forward calls `topk`. Layers are known by their modules, not
by the order of calls, since the backward pass recomputes them in another order.

Under tensor parallelism a router sees this rank's share of the tokens: it replays its share of the experts, and
recorded routes are gathered. A pipeline rank has the routers of its layers.

Shapes: N packed tokens, L layers with a router on this rank, M in the whole model, E experts, k experts of a token.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

from braidrl.algorithms.ragged import Ragged
from braidrl.errors import UserError
from braidrl.training.compute.cpu_layers import derived
from braidrl.training.decoders.body import body_of, plan_of_model
from braidrl.training.decoders.shrink import CHOSEN, EXPERTS

ROUTERS = "number_of_routers"
"""Attribute of a model whose routers are numbered: how many it has, with those on other ranks."""
PREPARED = "prepared_routers"
"""Attribute of a model whose routers record and replay."""
LAYER = "routing_layer"
"""Attribute of a router: its number among the routers of the model."""
FREE = -1
"""A replayed expert in place of which the router chooses."""


@dataclass
class Routing:
    """The routes of one forward pass of N tokens."""

    given: Tensor | None = None
    """The experts to replay, (N, M, k), or `FREE` where the router chooses; None to replay none."""
    is_given: Tensor | None = None
    """(N,) bool, False for tokens without experts to replay, for which the routers choose."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """The experts (N, k) that each layer has used."""
    keeps_logits: bool = False
    logits: dict[int, Tensor] = field(default_factory=dict)
    """The router's logits (N, E) of each layer, with gradient, of the first pass: recomputed layers change nothing."""
    changed: dict[int, Tensor] = field(default_factory=dict)
    """The share (N,) of each token's replayed experts that the layer's router would not have chosen."""
    is_sigmoid: bool = False
    """True if the scores are the sigmoid of the logits instead of their softmax."""
    tokens: int = 0
    """N, if `mesh` is set."""
    mesh: DeviceMesh | None = None
    """The tensor ranks, each of which routes an equal share of the tokens; None without them."""

    def share(self, values: Tensor, rows: int | None = None) -> Tensor:
        """Return the values of the tokens that this rank routes, from values (N, ...) of all; a router that processes
        `rows` tokens may process all of them.
        """
        if self.mesh is None or rows == self.tokens or len(values) < self.tokens:
            return values
        return values.chunk(self.mesh.size())[self.mesh.get_local_rank()]

    def recorded(self) -> Tensor:
        """Return the experts that were used, (N, L, k)."""
        return self.of_all_tokens(self.chosen)

    def of_all_tokens(self, by_layer: Mapping[int, Tensor]) -> Tensor:
        """Return the recorded values of each layer as one tensor, (N, L, ...); all tensor ranks call this together."""
        local = torch.stack([self.share(by_layer[layer]) for layer in sorted(by_layer)], 1)
        if self.mesh is None:
            return local
        return (
            DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False)
            .redistribute(placements=[Replicate()])
            .to_local()
        )


current: ContextVar[Routing | None] = ContextVar("routing", default=None)
"""The routing of the current forward pass; recomputed layers see that of their forward pass."""


@contextmanager
def routed(routing: Routing | None) -> Iterator[None]:
    """Make routers record to, and replay from, a routing."""
    token = current.set(routing)
    try:
        yield
    finally:
        current.reset(token)


class RoutedSelection(TorchFunctionMode):
    """Records or replaces the experts that one call of a router selects."""

    def __init__(self, routing: Routing, layer: int, experts: int) -> None:
        super().__init__()
        self.routing, self.layer, self.experts = routing, layer, experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.routing.keeps_logits and isinstance(result, Tensor) and result.shape[-1:] == (self.experts,):
            if func is torch.nn.functional.linear:
                self.routing.logits.setdefault(self.layer, result.reshape(-1, self.experts))
            self.routing.is_sigmoid |= func in (torch.sigmoid, Tensor.sigmoid)
        # Other calls of `topk` select groups of experts.
        if func not in (torch.topk, Tensor.topk) or args[0].dim() != 2 or args[0].shape[1] != self.experts:
            return result
        routing, scores, chosen = self.routing, args[0], result.indices
        if routing.given is not None and routing.is_given is not None:
            replayed = routing.share(routing.given[:, self.layer], len(scores)).to(chosen.dtype)
            is_given = routing.share(routing.is_given, len(scores))[:, None] & (replayed != FREE)
            if routing.keeps_logits:
                missing = (replayed[:, :, None] != chosen[:, None, :]).all(-1) & is_given
                routing.changed[self.layer] = missing.to(scores.dtype).mean(-1)
            chosen = torch.where(is_given, replayed, chosen)
            result = torch.return_types.topk((scores.gather(-1, chosen), chosen))
        routing.chosen[self.layer] = chosen
        return result


def router_forward(self: Any, *arguments: Any, **named: Any) -> Any:
    """Run a router, in the current routing if there is one."""
    routing = current.get()
    if routing is None:
        return self.plain_forward(*arguments, **named)
    layer, experts = getattr(self, LAYER)
    with RoutedSelection(routing, layer, experts):
        return self.plain_forward(*arguments, **named)


def record(router: Any, chosen: Tensor) -> None:
    """Record experts (N, k) that were chosen with a router's weight and not by its forward."""
    if (routing := current.get()) is not None:
        routing.chosen[layer_of(router)] = chosen


def use_routing(model: Any) -> int:
    """Prepare a model's routers in place for `routed`; return their number, including those on other ranks.

    Raises UserError for a model without routers, or whose routers do not process packed tokens.
    """
    count = number_routers(model)
    if not count or plan_of_model(model).by_rows:
        name = type(model).__name__
        raise UserError(f"{name} has no routers of experts that Braid can follow; remove `replay` and trainer.balance")
    if not getattr(model, PREPARED, False):
        for router in routers_of(model):
            kind: Any = type(router)
            if not hasattr(kind, "plain_forward"):
                router.__class__ = derived(kind, router_forward)
        setattr(model, PREPARED, True)
    return count


def number_routers(model: Any) -> int:
    """Number the routers of a model with all its layers; return their number, 0 for a dense model.

    A model that is already numbered, and may have lost layers to other pipeline ranks, stays unchanged.
    """
    if (numbered := getattr(model, ROUTERS, None)) is not None:
        return int(numbered)
    experts = experts_of(model)
    routers = [
        module
        for layer in body_of(model).layers
        for module in layer.modules()
        if experts and calls_topk(getattr(type(module), "plain_forward", type(module).forward))
    ]
    for number, router in enumerate(routers):
        setattr(router, LAYER, (number, experts))
    setattr(model, ROUTERS, len(routers))
    return len(routers)


def routers_of(model: Any) -> list[Any]:
    """Return the routers of a numbered model on this rank, in the order of its layers."""
    return sorted((m for m in model.modules() if hasattr(m, LAYER)), key=layer_of)


def layer_of(router: Any) -> int:
    """Return a router's number among those of the full model."""
    return int(getattr(router, LAYER)[0])


@cache
def calls_topk(forward: Any) -> bool:
    """Return True if a module's forward selects by `topk`."""
    try:
        return "topk(" in inspect.getsource(forward)
    except (OSError, TypeError):
        return False


def with_free_layers(routes: Ragged, layers: Tensor) -> Ragged:
    """Return the routes (tokens, M, k) of B rows with `FREE` in one layer of each row, which `layers` (B,) names."""
    values = routes.values.to(torch.int16)
    values[torch.arange(len(values)), layers.repeat_interleave(routes.lengths)] = FREE
    return routes.with_values(values)


def routes_dtype(model: Any) -> torch.dtype:
    """Return the data type of expert numbers in a column: one byte up to 256 experts."""
    return torch.uint8 if experts_of(model) <= 256 else torch.int16


def experts_of(model: Any) -> int:
    """Return the number of experts of a mixture's layer, 0 for a dense model."""
    return experts_in(model.config)


def experts_per_token(model: Any) -> int:
    """Return the number of experts that each token has in a mixture's layer."""
    config = model.config.get_text_config()
    return next(int(getattr(config, key)) for key in CHOSEN if getattr(config, key, None))


def experts_in(config: Any) -> int:
    """Return the number of experts among which a model's routers choose, by its configuration; 0 if it has none."""
    config = config.get_text_config()
    experts = next((int(getattr(config, key)) for key in EXPERTS if getattr(config, key, None)), 0)
    return experts + (getattr(config, "zero_expert_num", None) or 0 if experts else 0)
