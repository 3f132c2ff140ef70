"""A decoder's parts by common names, found by structure, and its forward pass.

ids ──embedding──▶ layers ──norm──▶ hidden states ──head──▶ logits
        `embedding`  `layers`  `norm`                `head` (see `head`)

`PARTS` lists the names that decoders use. A decoder with other names has the layers of all its lists: it trains if the
proof holds, without pipeline parallelism. Users may register a function in `BODIES` for such a decoder.
"""

import logging
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from braidrl.errors import UserError
from braidrl.training.compute import attention
from braidrl.training.compute.cpu_layers import derived
from braidrl.training.compute.experts import EXPERTS
from braidrl.training.compute.rope import use_row_lengths
from braidrl.training.compute.slots import PrefillSequences, Prefix

PARTS = {
    "embedding": ("embed_tokens", "wte", "word_embeddings", "embeddings", "embed_in", "tokens_embed", "w"),
    "layers": ("layers", "h", "blocks", "block"),
    "norm": (
        "norm",
        "final_layernorm",
        "ln_f",
        "norm_f",
        "final_layer_norm",
        "embedding_norm",
        "layer_norm",
        "final_norm",
        "out_norm",
        "ln_out",
        "layernorm",
    ),
}
"""Known names of a decoder's parts, in search order."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForwardPlan:
    """The execution of a decoder's forward pass: packed, except for mixers (token mixing outside attention)."""

    mixers: tuple[str, ...] = ()
    """Names of mixer classes, which run once per length over rows of that length."""
    by_rows: bool = False
    """The whole decoder runs once per length, with transformers' own attention."""

    def __str__(self) -> str:
        if self.by_rows:
            return "rows of equal length together, with transformers' own attention"
        return "packed rows" + (f", {', '.join(self.mixers)} by rows of equal length" if self.mixers else "")

    @property
    def attention(self) -> str:
        return "eager" if self.by_rows else attention.ATTENTION


PACKED = ForwardPlan()
RECEIVED = "received_states"
"""Attribute of a model without its first layers: a list with the placeholder that returns `hidden`."""
MOST_PASSES = "most_passes"
"""Attribute of a model whose experts are sharded: a function of a rank's number of forward passes, which returns the
largest of all ranks.
"""
TOKENS_RANK = "tokens_rank"
"""Attribute of an embedding whose output has a share of the tokens: (rank, ranks) of tensor parallelism."""
PLAN = "forward_plan"
"""Attribute of a model with the plan of `use_plan`."""


class Body:
    """The parts of one decoder: the module that holds them, and its attributes `embedding`, `layers` and `norm` by
    their names, None if there is no such attribute.
    """

    def __init__(
        self, decoder: Any, embedding_name: str | None, layers_name: str | None, norm_name: str | None
    ) -> None:
        self.decoder, self.embedding_name, self.layers_name, self.norm_name = (
            decoder,
            embedding_name,
            layers_name,
            norm_name,
        )
        self.embedding: Any
        self.layers: Any
        self.norm: Any
        self.embedding, self.layers, self.norm = (
            None if name is None else getattr(decoder, name) for name in (embedding_name, layers_name, norm_name)
        )
        if layers_name is None:
            self.layers = nn.ModuleList(listed_layers(decoder))

    def sharded_names(self) -> tuple[str, str]:
        """Return the names of embedding and layers, which pipeline and tensor parallelism need. Raises UserError."""
        if self.embedding_name is None or self.layers_name is None:
            part = "embedding" if self.embedding_name is None else "list of layers"
            raise UserError(
                f"model: {type(self.decoder).__name__} has no {part} under a name that Braid knows, which the axes "
                "pipeline and tensor need; register it in decoders.body.BODIES"
            )
        return self.embedding_name, self.layers_name


BODIES: dict[str, Callable[[Any], Body]] = {}
"""Functions from a model to its body, by model type, for decoders with another structure."""


TEXT = ("language_model", "text_model")
"""Names of the text part of a model that also sees or hears."""


def decoder_of(model: Any) -> Any:
    """Return the submodule of a model that maps ids to hidden states."""
    body = base_of(model)
    body = next((getattr(body, name) for name in TEXT if isinstance(getattr(body, name, None), nn.Module)), body)
    return getattr(body, "decoder", body) if not hasattr(body, "layers") else body


def base_of(model: Any) -> Any:
    """Return a model without its head."""
    body = model.base_model
    return getattr(model, "model", model) if body is model else body


def non_text_modules(model: Any) -> list[str]:
    """Return the names in `base_of` of the modules without text inputs: towers of images and sound, and projections."""
    base, decoder = base_of(model), decoder_of(model)
    if base is model or base is decoder or not any(getattr(base, name, None) is decoder for name in TEXT):
        return []
    return [name for name, module in base.named_children() if module is not decoder]


def non_text_parameters(model: Any) -> list[nn.Parameter]:
    """Return the parameters that text does not use."""
    if not non_text_modules(model):
        return []
    base, text = base_of(model), set(map(id, decoder_of(model).parameters()))
    return [parameter for parameter in base.parameters() if id(parameter) not in text]


def body_of(model: Any) -> Body:
    """Return the parts of a model's decoder. Raises UserError if it has no layers."""
    if special := BODIES.get(getattr(model.config, "model_type", "")):
        return special(model)
    decoder = decoder_of(model)
    names = [
        next((n for n in candidates if isinstance(getattr(decoder, n, None), nn.Module)), None)
        for candidates in PARTS.values()
    ]
    body = Body(decoder, *names)
    if not len(body.layers):
        raise UserError(
            f"model: {type(decoder).__name__} has no list of layers; register a function that finds them in "
            "decoders.body.BODIES"
        )
    return body


def listed_layers(module: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost lists of modules, in their order."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [layer for child in module.children() for layer in listed_layers(child)]


def use_sdpa_in_towers(model: Any) -> None:
    """Let the towers of a model compute with transformers' SDPA: their tokens see each other in both directions."""
    text = {id(module) for module in decoder_of(model).modules()}
    for module in model.modules() if non_text_parameters(model) else ():
        config: Any = getattr(module, "config", None)
        # A setting of the whole model's configuration, which projections may have too, would reach the text part.
        is_own = hasattr(config, "_attn_implementation") and config.get_text_config() is config
        if is_own and id(module) not in text:
            config._attn_implementation = "sdpa"


def use_plan(model: Any, plan: ForwardPlan) -> None:
    """Prepare a model in place for `run_body`."""
    setattr(model, PLAN, plan)
    use_row_lengths(model)
    use_sdpa_in_towers(model)
    model.set_experts_implementation(EXPERTS)  # if transformers offers a choice for mixtures
    for module in model.modules() if plan.mixers else ():
        kind: Any = type(module)
        if kind.__name__ in plan.mixers and not hasattr(kind, "plain_forward"):
            module.__class__ = derived(kind, mixer_forward)


def plan_of_model(model: Any) -> ForwardPlan:
    plan: ForwardPlan = getattr(model, PLAN, PACKED)
    return plan


def mixer_forward(self: Any, *arguments: Any, **named: Any) -> Any:
    """Run a mixer through the current attention context, if there is one."""
    context = attention.running.get()
    if context is None:
        return self.plain_forward(*arguments, **named)
    return context.mix(self, self.plain_forward, arguments, named)


def run_body(
    model: Any,
    input_ids: Tensor | None,
    position_ids: Tensor,
    context: attention.AttentionContext,
    hidden: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the last hidden states (B, N, D) of tokens (B, N), at `position_ids` within their sequences, in an
    attention context.

    `hidden`, without `input_ids`, replaces the embedded tokens, or the output of layers on earlier pipeline ranks;
    `options` are further arguments of the decoder's forward.
    """
    decoder = decoder_of(model)
    inputs = {"input_ids": input_ids, "inputs_embeds": hidden, "position_ids": position_ids, "use_cache": False}
    accepted = attention.parameters_of(type(decoder).forward)
    arguments = {name: value for name, value in (inputs | options).items() if name in accepted}
    if hidden is not None and (received := getattr(model, RECEIVED, None)):
        received[0].hidden = hidden

    if plan_of_model(model).by_rows:
        if not isinstance(context, attention.PackedSequences):
            raise ValueError(
                f"{type(decoder).__name__} runs over rows of equal length, which {type(context).__name__} does not "
                "support"
            )
        return run_by_rows(model, context, arguments)
    with attention.attending(context):
        states: Tensor = decoder(**arguments).last_hidden_state
    return states


def run_by_rows(model: Any, context: attention.PackedSequences, arguments: dict[str, Any]) -> Tensor:
    """Run the decoder once for each length of sequences, and return the last hidden states (B, N, D).

    Ranks that share experts exchange tokens in each of these passes: one with fewer lengths adds passes over its first
    token, whose results are dropped.
    """

    def run(**named: Any) -> Tensor:
        states: Tensor = decoder_of(model)(**named).last_hidden_state
        return states

    passes = len(context.in_batches(1).shapes)
    most_passes = getattr(model, MOST_PASSES, None)
    missing = most_passes(passes) - passes if most_passes is not None else 0
    states: Tensor = context.mix(decoder_of(model), run, (), arguments, multiple=1)
    first = {
        name: arguments[name][..., :1] for name in ("input_ids", "position_ids") if arguments.get(name) is not None
    }
    if arguments.get("inputs_embeds") is not None:
        first["inputs_embeds"] = arguments["inputs_embeds"][:, :1]
    for _ in range(missing):
        with attention.attending(attention.EqualRows((1, 1), context.keep_scores)):
            states = states + 0 * run(**arguments | first).sum()
    return states


@dataclass(frozen=True)
class PromptImages:
    """The images of packed prompts."""

    run: Callable[..., Tensor]
    """The forward pass with images, in place of `run_body`."""
    blocks: Tensor | None = None
    """(N,): the number of each token's image, 0 for text, if its tokens see each other."""


def prefill(
    model: Any, prompts: Sequence[Tensor], multiple: int = 1, images: PromptImages | None = None
) -> list[Prefix]:
    """Compute the keys, values and states of prompts, given without their last tokens, in one packed forward pass.

    The pass has a multiple of `multiple` tokens.
    """
    lengths = [len(ids) for ids in prompts]
    filler = -sum(lengths) % multiple
    blocks = None if images is None or images.blocks is None else pad(images.blocks, (0, filler)).to(model.device)
    sequences = attention.PackedSequences.of([*lengths, filler], model.device, blocks=blocks)
    packed = torch.cat([ids.to(model.device) for ids in (*prompts, torch.zeros(filler, dtype=torch.int64))])
    keeping = PrefillSequences(sequences)
    run = run_body if images is None else images.run
    run(model, packed[None], sequences.position_ids(), keeping)
    return keeping.prefixes(len(lengths))


def set_training(model: Any, training: bool) -> None:
    """Set a model's mode: only checkpointed layers are in training mode, so that no random numbers are drawn."""
    model.eval()
    for module in model.modules() if training else ():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def checkpoint_activations(model: Any) -> None:
    """Enable activation checkpointing: the backward pass recomputes each layer, in its attention context."""

    def recomputed(layer: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return checkpoint(copy_context().run, layer, *arguments, use_reentrant=False, **options)

    try:
        model._set_gradient_checkpointing(True, recomputed)
    except ValueError as error:
        raise UserError(
            f"trainer.checkpoint_activations: {type(model).__name__} has no layers that support recomputation; write "
            "false"
        ) from error
