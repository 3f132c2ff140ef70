"""A decoder's parts under one set of names, found by structure, and the one way in which its forward is run.

ids ──embedding──▶ layers ──norm──▶ hidden states ──head──▶ logits
        `embedding`  `layers`  `norm`                `head` (see `head`)

Most decoders name their parts alike; `PARTS` lists the names that occur. `BODIES` takes a function for one that structure cannot
tell, also from outside of the package.
"""

import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from braidrl.errors import UserError
from braidrl.training.compute.attention import (
    ATTENTION,
    AttentionContext,
    PackedSequences,
    attending,
    checkpoint_layer,
    running,
)
from braidrl.training.compute.swapping import derived

PARTS = {
    "embedding": ("embed_tokens", "wte", "word_embeddings", "embeddings", "embed_in", "tokens_embed", "w"),
    "layers": ("layers", "h", "blocks", "block"),
    "norm": (
        "norm", "final_layernorm", "ln_f", "norm_f", "final_layer_norm", "embedding_norm", "layer_norm", "final_norm",
        "out_norm", "ln_out", "layernorm",
    ),
}  # fmt: skip
"""The names of a decoder's parts, in the order in which they are looked for."""
RANDOM = re.compile(r"(dropout|pdrop|layerdrop|jitter)")
"""Names of settings that make a forward random."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForwardPlan:
    """How rows go through a decoder: packed, but for what mixes tokens outside of the attention interface."""

    mixers: tuple[str, ...] = ()
    """Names of module classes that run once for each length, over rows of that length."""
    by_rows: bool = False
    """The whole decoder runs so, with transformers' own attention."""

    @property
    def attention(self) -> str:
        """Return the name of the attention implementation that the model is made with."""
        return "eager" if self.by_rows else ATTENTION

    @property
    def is_packed(self) -> bool:
        return not self.mixers and not self.by_rows


PACKED = ForwardPlan()
RECEIVED = "received_states"
"""Attribute of a model without its first layers: a list of the module that stands before the first of its own, and returns `hidden`."""
PLAN = "forward_plan"
"""Attribute of a model that `use_plan` has prepared."""


@dataclass(eq=False)
class Body:
    """The parts of one decoder; `decoder` is the module that holds them, of whose attributes the others are named."""

    decoder: Any
    embedding_name: str
    layers_name: str
    norm_name: str

    @property
    def embedding(self) -> Any:
        return getattr(self.decoder, self.embedding_name)

    @embedding.setter
    def embedding(self, module: nn.Module) -> None:
        setattr(self.decoder, self.embedding_name, module)

    @property
    def layers(self) -> Any:
        return getattr(self.decoder, self.layers_name)

    @property
    def norm(self) -> Any:
        return getattr(self.decoder, self.norm_name)

    @norm.setter
    def norm(self, module: nn.Module) -> None:
        setattr(self.decoder, self.norm_name, module)


BODIES: dict[str, Callable[[Any], Body]] = {}
"""By model type, a function from a model to its body, where structure does not tell."""


def decoder_of(model: Any) -> Any:
    """Return the module of a causal model or a scorer that maps ids to hidden states."""
    body = model.base_model
    if body is model:
        body = getattr(model, "model", model)
    return getattr(body, "decoder", body) if not hasattr(body, "layers") else body


def body_of(model: Any) -> Body:
    """Return the parts of a causal model or a scorer. Raises UserError, naming the part, where they cannot be told."""
    if special := BODIES.get(getattr(model.config, "model_type", "")):
        return special(model)
    decoder = decoder_of(model)
    found = []
    for part, names in PARTS.items():
        name = next((n for n in names if isinstance(getattr(decoder, n, None), nn.Module)), None)
        if name is None:
            raise UserError(
                f"model: {type(decoder).__name__} has no {part} under a name that Braid knows; register it in decoders.body.BODIES"
            )
        found.append(name)
    return Body(decoder, *found)


def use_plan(model: Any, plan: ForwardPlan) -> None:
    """Prepare a model, in place, for `run_body`."""
    setattr(model, PLAN, plan)
    for module in model.modules() if plan.mixers else ():
        kind: Any = type(module)
        if kind.__name__ in plan.mixers and not hasattr(kind, "plain_forward"):
            module.__class__ = derived(kind, mixer_forward)


def plan_of_model(model: Any) -> ForwardPlan:
    """Return the plan that a model was prepared with."""
    plan: ForwardPlan = getattr(model, PLAN, PACKED)
    return plan


def mixer_forward(self: Any, *given: Any, **named: Any) -> Any:
    """Run a mixer as the forward pass's context says."""
    context = running.get()
    if context is None:
        return self.plain_forward(*given, **named)
    return context.mix(self, self.plain_forward, given, named)


def run_body(
    model: Any, input_ids: Tensor | None, position_ids: Tensor, context: AttentionContext, hidden: Tensor | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Return the last hidden states (B, N, D) of tokens (B, N) in the context of a forward pass.

    Args:
        model: A causal model or a scorer.
        input_ids: The tokens; None with `hidden`.
        position_ids: Their positions in their sequences.
        context: Which tokens each of them sees.
        hidden: Takes the place of the embedded tokens, or of what the layers before a pipeline rank's own have made of them.
        options: More arguments of the decoder's forward.
    """
    decoder = decoder_of(model)
    inputs = {"input_ids": input_ids, "inputs_embeds": hidden, "position_ids": position_ids, "use_cache": False}
    given = {name: value for name, value in (inputs | options).items() if name in accepted(decoder)}

    if hidden is not None and (received := getattr(model, RECEIVED, None)):
        received[0].hidden = hidden

    def forward(**named: Any) -> Tensor:
        found: Tensor = decoder(**named).last_hidden_state
        return found

    if plan_of_model(model).by_rows:
        if not isinstance(context, PackedSequences):
            raise ValueError(
                f"{type(decoder).__name__} runs by rows of equal length, which {type(context).__name__} has not"
            )
        mixed: Tensor = context.mix(decoder, forward, (), given)
        return mixed
    with attending(context):
        return forward(**given)


def accepted(decoder: Any) -> frozenset[str]:
    """Return the named arguments that a decoder's forward takes."""
    return _parameters(type(decoder).forward)


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def still(config: Any) -> list[str]:
    """Set everything in a configuration that makes a forward random to 0, in place, and return the names."""
    found = []
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and name.endswith("config"):
            found += still(value)
        elif RANDOM.search(name) and isinstance(value, float | int) and not isinstance(value, bool) and value > 0:
            setattr(config, name, 0.0)
            found.append(name)
    return found


def set_training(model: Any, training: bool) -> None:
    """Set the mode of a model: only layers that are checkpointed know that it trains, so that nothing draws random numbers."""
    model.eval()
    for module in model.modules() if training else ():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def checkpoint_activations(model: Any) -> None:
    """Have each layer computed again in the backward pass, in place of keeping what it computes."""
    try:
        model._set_gradient_checkpointing(True, checkpoint_layer)
    except ValueError as error:
        raise UserError(
            f"trainer.checkpoint_activations: {type(model).__name__} has no layers that can be computed again; write false"
        ) from error
