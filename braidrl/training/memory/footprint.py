"""The device memory that a model needs, counted on the meta device without weights or computation.

weights ─ gradient sums ─ master weights ─ AdamW's moments      from the parameters' number and types
weights gathered while it computes                              from the layout
activations of a micro-batch                                    from the tensors that autograd saves in a forward pass
                                                                on meta tensors

All axes of a layout are assumed to divide everything evenly (norms are replicated, but are a ten-thousandth of a
model). The fullest pipeline rank is counted: the first or the last, which hold the vocabulary.
"""

import contextlib
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from braidrl.config import LoraConfig
from braidrl.config.layout import ParallelLayout
from braidrl.training.compute.attention import ATTENTION, AttentionContext, PackedSequences, Scores
from braidrl.training.compute.log_probs import CHUNK_BYTES
from braidrl.training.compute.slots import PrefillSequences
from braidrl.training.decoders.body import (
    PACKED,
    ForwardPlan,
    body_of,
    non_text_parameters,
    plan_of_model,
    run_body,
    use_plan,
)
from braidrl.training.decoders.proof import FAILURES, proven_plan
from braidrl.training.decoders.shrink import CHOSEN, HEADS, KEY_HEADS, LAYERS, WIDTHS
from braidrl.training.lora import BYTES_PER_WEIGHT, NAME, add_adapters
from braidrl.training.optimizer import MASTER_BYTES
from braidrl.training.parallel.experts import dispatch_of, stacked_parameters
from braidrl.training.parallel.pipeline import RUN
from braidrl.training.parallel.sequence import QUERIES
from braidrl.training.parallel.tensor import ROWS, blocks_of, gather_tokens, plan_of
from braidrl.training.pretrained import read_model_config
from braidrl.weights.model_files import auto_class, scorer_class

MOMENTS = 2
UNIFORM = {"qwen2", "qwen3", "llama", "mistral", "ministral3", "smollm3", "qwen3_moe"}
"""Model types whose layers save equal amounts, so that counting two layers is enough."""
COUNTED = 2048
"""Tokens at which activations are counted; they grow in proportion."""
ALONE = ParallelLayout(data=1)


class ModelSizes(NamedTuple):
    """A model configuration's sizes by the same names, cached: access in transformers takes microseconds."""

    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool

    @staticmethod
    def of(config: Any) -> "ModelSizes":
        """Return the sizes of a transformers configuration; model types name them differently."""
        text = config.get_text_config()

        def first(names: Sequence[str], default: int = 1) -> int:
            values = (uniform_setting(text, name) for name in names)
            return next((value for value in values if isinstance(value, int) and value > 0), default)

        heads, width = first(HEADS), first(WIDTHS)
        return ModelSizes(
            first(LAYERS),
            width,
            text.vocab_size,
            heads,
            first(KEY_HEADS, heads),
            int(uniform_setting(text, "head_dim") or width // heads),
            bool(getattr(config, "tie_word_embeddings", False)),
        )


def uniform_setting(config: Any, name: str) -> Any:
    """Return a setting; None if it is missing or differs by layer."""
    try:
        return getattr(config, name, None)
    except (ValueError, RuntimeError):
        return None


@dataclass(frozen=True, eq=False)
class Shape:
    """The sizes of a role's model."""

    name: str
    config: Any
    parameters: int
    layer_parameters: int
    """Parameters of one decoder layer."""
    dtype: torch.dtype
    trained: int
    """Trained parameters: all, or the adapters."""
    copied: int
    """Adapter parameters that tensor parallelism replicates."""
    four_bit: int = 0
    """Parameters in 4 bits, under adapters."""
    idle: int = 0
    """Parameters of experts that a token does not use."""
    experts: int = 0
    """Parameters of all experts that `expert` can shard."""
    trained_experts: int = 0
    """Trained parameters among them: all, or their adapters."""
    num_experts: int = 0
    """Experts of a layer."""
    chosen_experts: int = 0
    """Experts of a token in a layer."""
    tower: int = 0
    """Parameters that text does not use: those of a vision tower, which tensor parallelism replicates."""
    is_uniform: bool = True
    """True if all layers save the same bytes for the backward pass, so that counting two of them is enough."""

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    @cached_property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.config)

    @cached_property
    def cached_elements(self) -> tuple[int, int]:
        return cached_elements(self.config)


MEASURED: dict[tuple[str, torch.dtype, bool, str], Shape] = {}
"""This process's cache: checks, plans and dry runs ask repeatedly; a large model with adapters takes half a second."""


def model_shape(folder: Path, dtype: torch.dtype, scalar_head: bool = False, lora: LoraConfig | None = None) -> Shape:
    """Measure the model that a folder's config.json describes, with its adapters.

    Raises UserError as `load_decoder`.
    """
    config = read_model_config(folder)
    key = config.to_json_string(use_diff=False), dtype, scalar_head, lora.model_dump_json() if lora else ""
    if key not in MEASURED:
        model: Any = on_meta(config, dtype, scalar_head)
        if lora:
            with torch.device("meta"):
                add_adapters(model, lora)
        layers = body_of(model).layers
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        copied = 0
        for layer in body_of(model).layers:
            for block in blocks_of(layer, config.base_model_tp_plan or {}):
                for name, style in block.products.items():
                    if hasattr(product := layer.get_submodule(name), "base_layer"):
                        # The factor of an adapter that tensor parallelism replicates.
                        copied += (product.lora_B if style in ROWS else product.lora_A)[NAME].weight.numel()
        few = sum(m.base_layer.weight.numel() for m in model.modules() if hasattr(m, "base_layer"))
        four_bit = few if lora and lora.base_dtype else 0
        every, tower = (
            sum(p.numel() for p in parameters) for parameters in (model.parameters(), non_text_parameters(model))
        )
        # Some layers of some mixtures are dense.
        by_layer = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
        per_layer = sum(by_layer) // len(layers)
        shape = Shape(type(model).__name__, config, every, per_layer, dtype, trained, copied, four_bit, tower=tower)
        kinds = set(uniform_setting(config, "layer_types") or ()) - {"full_attention", "sliding_attention"}
        is_uniform = config.model_type in UNIFORM and not kinds and len(set(by_layer)) == 1
        MEASURED[key] = replace(shape, **expert_sizes(model), is_uniform=is_uniform)
    return MEASURED[key]


def expert_sizes(model: PreTrainedModel) -> dict[str, Any]:
    """Return the sizes of a mixture by their names in `Shape`; none without experts."""
    text = model.config.get_text_config()
    chosen = next((uniform_setting(text, name) for name in CHOSEN if uniform_setting(text, name)), None)
    if not isinstance(chosen, int):
        return {}
    modules = [module for module in model.modules() if isinstance(getattr(module, "num_experts", None), int)]
    # Each expert's weights are a slice of one parameter; a router's weight is a matrix.
    stacked = [
        (parameter.numel(), module.num_experts, dispatch_of(module) is not None)
        for module in modules
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3 and len(parameter) == module.num_experts
    ]
    trained = sum(
        parameter.numel()
        for module in modules
        if dispatch_of(module) is not None
        for _, _, parameter in stacked_parameters(module)
        if parameter.requires_grad and parameter.dim() == 3
    )
    idle = sum(size // count * max(count - chosen, 0) for size, count, _ in stacked)
    divisible = [(size, count) for size, count, can_be_sharded in stacked if can_be_sharded]
    return {
        "idle": idle,
        "experts": sum(size for size, _ in divisible),
        "trained_experts": trained,
        "num_experts": math.gcd(*(count for _, count in divisible)),
        "chosen_experts": chosen,
    }


def on_meta(config: Any, dtype: torch.dtype, scalar_head: bool = False) -> PreTrainedModel:
    auto = (scorer_class if scalar_head else auto_class)(config)
    copied = deepcopy(config)
    if scalar_head:
        copied.num_labels = 1
    with torch.device("meta"):
        try:
            return auto.from_config(copied, dtype=dtype, attn_implementation=ATTENTION)
        except KeyError:  # a type with a separate class for each attention implementation
            return auto.from_config(copied, dtype=dtype, attn_implementation="eager")


def resident_bytes(
    shape: Shape, trained: bool, layout: ParallelLayout = ALONE, moment_bytes: float = MASTER_BYTES
) -> dict[str, int]:
    """Return the resident bytes between steps, by kind; `moment_bytes` is that of one moment of a float32 weight."""
    local = local_parameters(shape, layout)
    saved = shape.four_bit * (shape.element_bytes - BYTES_PER_WEIGHT)
    parts = {"weights": local * shape.element_bytes - int(saved)}
    if trained:
        if shape.trained < shape.parameters:
            of_experts = shape.trained_experts if layout.expert > 1 and layout.shard == "none" else 0
            divided = (shape.trained - shape.copied - of_experts) // layout.tensor
            local = (divided + shape.copied) // layout.shard_ranks + of_experts // layout.expert
            local //= layout.pipeline
        master = max(MASTER_BYTES, shape.element_bytes)
        parts["gradients"] = local * master
        if master > shape.element_bytes:
            parts["master weights"] = local * master
        parts["AdamW moments"] = int(local * master * MOMENTS * moment_bytes / MASTER_BYTES)
    return parts


def local_parameters(shape: Shape, layout: ParallelLayout) -> int:
    """Return the number of parameters that a rank stores."""
    layers, shards = shape.sizes.num_hidden_layers // layout.pipeline, layout.tensor * layout.shard_ranks
    parameters = layers * shape.layer_parameters + parameters_outside_layers(shape, layout)
    if layout.expert == 1:
        return (parameters - shape.tower) // shards + shape.tower // layout.shard_ranks
    # With `shard`, ranks with the same experts shard them further.
    experts = layers * layer_experts(shape)
    return (parameters - experts) // shards + experts // (layout.expert if layout.shard == "none" else shards)


def layer_experts(shape: Shape) -> int:
    """Return the number of parameters of a layer's experts, on average over the layers."""
    return shape.experts // shape.sizes.num_hidden_layers


def working_bytes(
    shape: Shape, layout: ParallelLayout, tokens: int, trained: bool, activations: int = 0, scalar: bool = False
) -> dict[str, int]:
    """Return the bytes, in addition to the resident ones, of computing a micro-batch, by kind; `activations` are those
    saved for a backward pass.

    `shard: full` gathers two layers (one computes while the next is prefetched) and everything outside layers, `shard:
    optimizer` all layers. A `scalar` model has no logits.
    """
    layers, width, parts = shape.sizes.num_hidden_layers // layout.pipeline, shape.element_bytes, dict[str, int]()
    if layout.shard != "none":
        gathered = layers if layout.shard == "optimizer" else min(2, layers)
        experts = gathered * layer_experts(shape) if layout.expert > 1 else 0
        gathered_parameters = parameters_outside_layers(shape, layout) + gathered * shape.layer_parameters - experts
        parts["weights gathered"] = gathered_parameters * width // layout.tensor + experts * width // layout.expert
    if layout.expert > 1:
        # A layer's rows in the all-to-all to experts and back, with an even load.
        share = -(-tokens // (layout.token_ranks * layout.tensor))
        parts["rows of experts"] = 2 * share * shape.chosen_experts * shape.sizes.hidden_size * width
    if layout.pipeline > 1:
        # A pipeline rank's receive buffers for one run: activations and, in training, gradients.
        activation = -(-tokens // (layout.token_ranks * layout.tensor)) * shape.sizes.hidden_size * width
        buffers = RUN * layout.pipeline * (2 if trained and layout.pipeline > 2 else 1)
        parts["messages between pipeline ranks"] = activation * buffers
    if layout.context > 1:
        # One layer's, and in training their gradients.
        sizes, split = shape.sizes, layout.tensor * layout.sequence
        gathered = 2 * tokens * sizes.num_key_value_heads * sizes.head_dim // split * width
        parts["keys and values gathered"] = gathered * (2 if trained else 1)
        # Of a block of queries: booleans, and what kernels add to scores.
        parts["mask of attention"] = QUERIES * tokens * (1 + width)
    if shape.four_bit:
        parts["weights of a layer"] = shape.layer_parameters * width
    if trained:
        parts["activations"] = activations
    if not scalar:
        # Simultaneous logits: one chunk, with its copy in at least float32 or its gradient.
        logits = tokens * shape.sizes.vocab_size // layout.tensor
        parts["logits"] = min(2 * CHUNK_BYTES, logits * (max(MASTER_BYTES, width) + width))
    return parts


def parameters_outside_layers(shape: Shape, layout: ParallelLayout) -> int:
    """Count the parameters of embedding, norm and head; in a pipeline, the larger of the first and last rank."""
    both = shape.parameters - shape.sizes.num_hidden_layers * shape.layer_parameters
    if layout.pipeline == 1:
        return both
    embedding = shape.sizes.vocab_size * shape.sizes.hidden_size
    # With tied weights, the last pipeline rank also holds the embedding.
    return both if both < 2 * embedding else both - embedding


def cache_bytes(elements: tuple[int, int], element_bytes: int, slots: int, tokens: int) -> int:
    """Return the bytes of the keys, values and states of `slots` rows of `tokens` tokens; `elements` are their
    numbers for each token and for each row, from `cached_elements`.
    """
    per_token, per_row = elements
    return element_bytes * slots * (per_token * tokens + per_row)


def cached_elements(config: Any) -> tuple[int, int]:
    """Return how many numbers an engine caches for each token, and for each row beside these."""
    key = config.to_json_string(use_diff=False)
    if key not in CACHED:
        plan, sizes = proven_plan(config, ""), ModelSizes.of(config)
        CACHED[key] = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim, 0
        if not plan.by_rows:
            # Count in a forward pass on the meta device, where torch supports grouped expert products only in bfloat16.
            prompt = PrefillSequences(PackedSequences.of([1], "meta"))
            model, token = on_meta(config, torch.bfloat16), torch.zeros((1, 1), dtype=torch.int64, device="meta")
            use_plan(model, plan)
            with contextlib.suppress(*FAILURES), torch.no_grad():
                run_body(model, token, token, prompt)
                (prefix,) = prompt.prefixes(1)
                CACHED[key] = (
                    sum(part.numel() for keys_values in prefix.keys_values for part in keys_values),
                    sum(state.numel() for states in prefix.states for state in states.values()),
                )
    return CACHED[key]


CACHED: dict[str, tuple[int, int]] = {}
"""The elements that an engine caches per token and per row, by configuration."""


def activation_bytes(shape: Shape, tokens: int, checkpointing: bool, layout: ParallelLayout = ALONE) -> int:
    """Return the bytes saved for a micro-batch's backward pass: all layers, or with checkpointing one layer and all
    layers' inputs.
    """
    share, layers = -(-tokens // (layout.token_ranks * layout.tensor)), shape.sizes.num_hidden_layers
    inputs = share * shape.sizes.hidden_size * shape.element_bytes
    if not shape.is_uniform:
        # Layers differ by more than attention windows: count all of them on one device.
        # Without a count, estimate a layer that saves its scores.
        layer, saved = 34 * shape.sizes.hidden_size + 2 * shape.sizes.num_attention_heads * share, saved_by_all(shape)
        every = layers * share * layer * shape.element_bytes // 2 if saved is None else int(saved * share)
        return every // layers + layers * inputs if checkpointing else every
    single, two = (saved_by_layers(shape, layers, layout.tensor) * share for layers in (1, 2))
    # A pipeline rank has fewer layers but proportionally more micro-batches in flight.
    return int(single + (layers * inputs if checkpointing else (layers - 1) * (two - single)))


@cache
def saved_by_all(shape: Shape) -> float | None:
    """Count the bytes per token that all layers save; None if the model's attention does not run on the meta device."""
    plan, model = proven_plan(shape.config, shape.name), on_meta(shape.config, shape.dtype)
    try:
        return kept_bytes(model, COUNTED, plan if not plan.by_rows else PACKED) / COUNTED
    except FAILURES:
        return None


@cache
def saved_by_layers(shape: Shape, layers: int, tensor: int) -> float:
    """Count the bytes per token that `layers` uniform layers save on one of `tensor` ranks."""
    config = deepcopy(shape.config)
    config.head_dim = ModelSizes.of(config).head_dim
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(config, name, getattr(config, name) // tensor)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = (list(config.layer_types) * layers)[:layers]
    model = on_meta(config, shape.dtype)
    if tensor > 1:
        divide_tokens(model, tensor)
    return kept_bytes(model, COUNTED * tensor) / COUNTED


def kept_bytes(model: Any, tokens: int, plan: ForwardPlan = PACKED) -> int:
    """Count the bytes that autograd saves in a forward pass on the meta device, without parameters."""
    use_plan(model, plan)
    storages = {p.untyped_storage()._cdata for p in model.parameters()}
    # Keep them alive, so that no address is reused.
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in storages:
            saved[storage] = tensor
        return tensor

    positions = torch.arange(tokens, device="meta")[None]
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = run_body(model, positions, positions, FusedAttention())
    saved[hidden.untyped_storage()._cdata] = hidden
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def divide_tokens(model: Any, ranks: int) -> None:
    """Make a model scatter and gather tokens as one of `ranks` tensor-parallel ranks does, with this rank's tokens in
    place of those of other ranks.
    """

    def shard(states: Tensor) -> Tensor:
        return states[:, : states.shape[1] // ranks].clone()

    def repeat_states(_: nn.Module, __: Any, output: Any) -> Any:
        output["last_hidden_state"] = output.last_hidden_state.repeat(1, ranks, 1)
        return output

    body, plan = body_of(model), plan_of(model)
    body.sharded_names()
    scattering = [body.embedding]
    for layer in body.layers:
        for block in blocks_of(layer, plan, plan_of_model(model).mixers):
            for name, scatter in block.gathers.items():
                module = layer.get_submodule(name)
                gather_tokens(module, lambda states: states.repeat(1, ranks, 1), shard if scatter else None)
            scattering += [layer.get_submodule(name) for name, style in block.products.items() if style in ROWS]
    for module in scattering:
        module.register_forward_hook(lambda _, __, states: shard(states))
    body.decoder.register_forward_hook(repeat_states)


class FusedAttention(AttentionContext):
    """An attention context for the meta device that saves for the backward pass as a fused kernel: no scores."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        return _Shapes.apply(query, key, value)


class _Shapes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, tokens, _ = query.shape
        output = query.new_empty((batch, tokens, heads, value.shape[-1]))
        ctx.save_for_backward(query, key, value, output)
        return output
