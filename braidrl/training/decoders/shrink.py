"""Tiny random models with the structure of a large one: same kinds of layers, ratios of heads, routing and scalings.

config.json ──▶ widths, counts and windows made small ──▶ a configuration of the same class ──▶ a random model

Every combination of layer kinds (`layer_types`, `mlp_layer_types`, rotary or not, ...) is kept. Windows become shorter
than the proof's sequences; scale factors are unchanged.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from braidrl.weights.model_files import auto_class

LEFT_OUT = {"quantization_config", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type"}
VOCABULARY = 96
UNPADDED = VOCABULARY - 2
"""Outputs of a model whose output layer is narrower than its embedding; special tokens are below."""
HEAD_WIDTH = 16
WINDOW = 6
LENGTH = 8
"""The length beyond which a twin's rope has other factors: shorter than some of the proof's rows, and their prompts."""
LONG = {"longrope", "su"}
"""Kinds of rope with two sets of factors."""
MOST_LAYERS = 8
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)
HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "num_decoder_attention_heads",
    "num_encoder_attention_heads",
)
HEAD_WIDTHS = (
    "head_dim",
    "d_head",
    "dim_head",
    "d_kv",
    "attention_head_size",
    "kv_channels",
    "hidden_size_per_head",
    "linear_head_dim",
    "index_head_dim",
    "indexer_head_dim",
)
OTHER_WIDTHS = ("qk_", "v_", "index", "linear", "mamba", "attention_head")
"""Beginnings of head widths that do not keep their ratio to `head_dim`."""
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_query_groups")
WIDTHS = ("hidden_size", "d_model", "n_embd", "emb_dim")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
    "moe_num_active_experts",
)
GROUPS = ("n_group", "num_expert_group")
"""Numbers of groups of experts; a router adds up the two best scores of each."""
WIDE = re.compile(r"(_size|_dim|_rank|_width|inner|ffn|dff|dim_ff|lora_rank|d_ssm|_hidden_size)$")
"""Names of widths, which keep their ratio to the model's width."""
KEPT = re.compile(r"(max_position|n_positions|n_ctx|^vocab_size_base|^patch|^image|^kernel|type_vocab|conv_kernel)")
SPAN = re.compile(r"(window|chunk|block|segment|span)(_?(size|len|length|tokens))?$")
"""Names of numbers of neighbouring tokens that are computed together."""
PERIODS = re.compile(r"(period|interval|_pattern|_every_n_layers|_step)$")
"""Names of numbers of layers after which kinds repeat."""
EXACT = {
    "mamba_d_state": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "time_step_rank": 8,
    "mamba_dt_rank": 8,
    "rotary_dim": 8,
    "linear_num_heads": 2,
    "zero_expert_num": 4,
}
"""Settings with the same small value in every model."""
MOST = {
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "window_size": WINDOW,
    "local_attention": WINDOW,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "block_size": 8,
    "index_block_size": 8,
    "floor_scale": 8,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "mamba_ngroups": 2,
    "encoder_layers": 2,
    "num_encoder_layers": 2,
    "num_global_layers": 2,
    "depth": 2,
    "num_layers_per_stack": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "index_topk": 4,
    "index_topk_blocks": 4,
    "index_kpool": 2,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "o_groups": 2,
    "num_embeddings": 64,
    "num_position_embeddings": 64,
    # fewer heads would give many keys a score of 0, and the choice among equals is arbitrary
    "index_n_heads": 16,
}
"""Upper limits of settings."""


def shrink_config(config: Any, head_width: int = HEAD_WIDTH) -> Any:
    """Return a configuration of the same class and structure with some ten thousand parameters."""
    settings = config.to_dict()
    shrunk = _shrunk(settings, head_width, _token_ids(settings))
    text, small = settings.get("text_config"), shrunk.get("text_config")
    if isinstance(text, dict) and isinstance(small, dict):
        # A tower's output has the width of the text part if it has in the original.
        for part, original in ((shrunk[name], value) for name, value in settings.items() if name in shrunk):
            for key, value in original.items() if isinstance(original, dict) and part is not small else ():
                if str(key).endswith(("_hidden_size", "_out_dim")) and value == text.get("hidden_size"):
                    part[key] = small["hidden_size"]
    return type(config)(**shrunk)


def tiny_model(config: Any, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Create a random model from a small configuration; parameters initialised to 0 or 1 get noise, and matrices are
    enlarged.

    Otherwise untrained norms, sinks, biases and gates would hide that they are not computed. Decays and time steps of
    state-space layers stay: larger ones would forget a state at once.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto_class(config).from_config(copy.deepcopy(config), **options)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.is_floating_point() and (parameter.dim() < 2 or float(parameter.std()) < 1e-3):
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif parameter.dim() >= 2 and not name.endswith(("bias", "A_log")):
                    # a convolution's short rows more than other matrices
                    parameter.mul_(max(4.0, parameter.shape[-1] ** -0.5 / float(parameter.std())))
                    if parameter.dim() == 2:
                        # The row of a padding token: states of 0 would have equal scores for all keys.
                        zero = (parameter == 0).all(-1)
                        parameter[zero] = float(parameter.std()) * torch.randn_like(parameter[zero])
    return model.eval()


def special_ids(config: Any) -> list[int]:
    """Return the ids of the tokens that begin, end and separate texts, from a configuration."""
    text = config.get_text_config()
    named = [getattr(text, f"{name}_token_id", None) for name in ("bos", "eos", "sep", "cls", "decoder_start")]
    ids = [token for value in named for token in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(token for token in ids if isinstance(token, int) and 0 <= token < text.vocab_size))


def is_token(name: Any) -> bool:
    """Return True if a setting is the id of a special token, or a list of such ids."""
    return isinstance(name, str) and name.endswith(("token_id", "token_index"))


def _token_ids(settings: dict[str, Any]) -> dict[int, int]:
    """Map the special tokens that are beyond the twin's vocabulary to ids within it, in all parts of a
    configuration. Different tokens keep different ids.
    """

    def ids(part: dict[str, Any]) -> Iterator[int]:
        for name, value in part.items():
            if isinstance(value, dict):
                yield from ids(value)
            elif is_token(name):
                yield from (
                    token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)
                )

    beyond = sorted({token for token in ids(settings) if token >= VOCABULARY})
    end = UNPADDED if settings.get("unpadded_vocab_size") else VOCABULARY
    return {token: end - 1 - number % (VOCABULARY // 2) for number, token in enumerate(beyond)}


def _shrunk(settings: dict[str, Any], head_width: int, tokens: dict[int, int]) -> dict[str, Any]:
    """Return the settings that are specific to a model type, made small; `tokens` are the ids of special tokens."""
    common = PreTrainedConfig().to_dict()
    specific = {
        name: value
        for name, value in settings.items()
        if not (name in LEFT_OUT or name.startswith("_") or (name in common and value == common[name]))
    }
    shrunk = {
        name: _shrunk(value, head_width, tokens) | {key: value[key] for key in ("model_type",) if key in value}
        if isinstance(value, dict) and name.endswith("config") and not name.startswith("per_")
        else value
        for name, value in specific.items()
    }
    sizes = _Sizes.of(shrunk, head_width)
    for name, value in specific.items():
        if is_token(name) and not KEPT.search(name) and value is not None:
            several = [tokens.get(token, token) for token in (value if isinstance(value, list) else [value])]
            shrunk[name] = several if isinstance(value, list) else several[0]
        elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            shrunk[name] = sizes.small_value(name, value)
        elif re.search(r"soft_?cap", name) and isinstance(value, float) and value > 0:
            shrunk[name] = 1.0  # as small as the tiny model's scores, so that the cap takes effect
        elif name == "initializer_range" and isinstance(value, float):
            shrunk[name] = 0.02  # wider weights would magnify rounding, and the twin's weights are random
        elif name == "head_dim" and value is None:
            shrunk[name] = head_width
        elif name == "num_attention_heads_per_layer" and isinstance(value, list):
            shrunk[name] = [sizes.heads] * len(value)
        elif name == "vision_feature_layer" and isinstance(value, list):
            shrunk[name] = [-1 - number % 2 for number in range(len(value))]
        elif name == "compress_rates" and value:
            shrunk[name] = {kind: max(2, min(rate // 2, 8)) for kind, rate in value.items()}
    for rule in (_attention, _recurrence, _experts, _layers, _positions, _tower):
        rule(shrunk, specific, sizes)
    return shrunk


class _Sizes(NamedTuple):
    original: int
    small: int
    heads: int
    keys: int
    head_width: int
    base: int
    """The original width of a head; `head_width` if it is not set."""

    @staticmethod
    def of(settings: dict[str, Any], head_width: int) -> "_Sizes":
        heads = next((settings[n] for n in HEADS if isinstance(settings.get(n), int) and settings[n] > 0), 4)
        keys = next((settings[n] for n in KEY_HEADS if isinstance(settings.get(n), int) and settings[n] > 0), heads)
        width = next((settings[n] for n in WIDTHS if isinstance(settings.get(n), int)), 64)
        few = min(keys, 2)
        heads_of_queries = few * max(1, min(heads // keys, 4))
        if not any(name in settings for name in KEY_HEADS):
            heads_of_queries = few = min(heads, 4)  # CodeGen interleaves its heads in four parts
        base = settings.get("head_dim") or head_width
        return _Sizes(width, max(heads_of_queries * head_width, 32), heads_of_queries, few, head_width, base)

    def small_value(self, name: str, value: int) -> int:
        is_kept = KEPT.search(name)
        if "vocab" in name and not is_kept:
            if name == "unpadded_vocab_size":
                return UNPADDED  # an output layer narrower than the embedding, as in the original
            return VOCABULARY if name == "vocab_size" else min(value, VOCABULARY)
        if name in EXACT or name in MOST:
            return EXACT[name] if name in EXACT else min(value, MOST[name])
        if name in HEADS or name.endswith("num_attention_heads"):
            return self.heads
        if name in KEY_HEADS or name.endswith(("num_key_value_heads", "num_global_key_value_heads")):
            return self.keys if name in KEY_HEADS else min(value, self.keys)
        if name in HEAD_WIDTHS:
            return self.head_width
        if name in ("lru_width", "hidden_size_global"):
            return self.small
        if name == "dim_model_base":
            return max(8, self.small * value // self.original)
        if SPAN.search(name) and not is_kept:
            return min(value, WINDOW)
        if is_kept or not (WIDE.search(name) or name in WIDTHS):
            return value
        if name.endswith("head_dim") and not name.startswith(OTHER_WIDTHS):
            # head widths of other layers keep their ratio
            return max(8, self.head_width * self.width(value) // self.base)
        return self.width(value)

    def width(self, value: int) -> int:
        """Return a width with about the same ratio to the model's width, rounded up to a multiple of 8."""
        if value <= 16:
            return value
        if value == self.original:
            return self.small
        return max(8, min(4 * self.small, -(-value * self.small // self.original // 8) * 8))


def _attention(shrunk: dict[str, Any], settings: dict[str, Any], sizes: _Sizes) -> None:
    if isinstance(settings.get("attention_hidden_size"), int):
        ratio = max(1, settings["attention_hidden_size"] // sizes.original)
        shrunk["attention_hidden_size"] = ratio * sizes.small
        if isinstance(settings.get("attention_head_dim"), int):
            shrunk["attention_head_dim"] = ratio * sizes.small // sizes.heads
    if isinstance(settings.get("qk_rope_head_dim"), int):
        # Latent attention, with the widths that vLLM's kernels support if wider heads are requested.
        rope, rank, plain, value = (8, 16, 16, 12) if sizes.head_width == HEAD_WIDTH else (64, 512, 128, 128)
        shrunk |= {"qk_rope_head_dim": rope, "kv_lora_rank": rank}
        for name, small in (("qk_nope_head_dim", plain), ("v_head_dim", value), ("q_lora_rank", 24)):
            if isinstance(settings.get(name), int):
                shrunk[name] = small
        if isinstance(settings.get("head_dim"), int):
            usual = rope if settings["head_dim"] == settings["qk_rope_head_dim"] else sizes.head_width
            shrunk["head_dim"] = plain + rope if has_wide_layers(settings) else usual
        shrunk.pop("qk_head_dim", None)


def has_wide_layers(settings: dict[str, Any]) -> bool:
    """Return True if some layers of latent attention have heads as wide as their parts with and without positions,
    which the model's other layers need not have.
    """
    changes = settings.get("per_layer_config")
    # Layers without an entry have the model's settings.
    layers = [settings, *(settings | changed for changed in changes.values())] if isinstance(changes, dict) else []
    return any(one.get("head_dim") == one["qk_rope_head_dim"] + one.get("qk_nope_head_dim", 0) for one in layers)


def _recurrence(shrunk: dict[str, Any], settings: dict[str, Any], sizes: _Sizes) -> None:
    inner = int(settings.get("mamba_expand", settings.get("expand", 2)) * sizes.small)
    for heads, width in (
        ("mamba_n_heads", "mamba_d_head"),
        ("mamba_num_heads", "mamba_head_dim"),
        ("n_mamba_heads", "mamba_headdim"),
    ):
        if isinstance(settings.get(heads), int):
            shrunk[heads] = min(settings[heads], 4)
            if isinstance(settings.get(width), int):
                shrunk[width] = inner // shrunk[heads]
    if settings.get("mamba_d_ssm"):
        shrunk["mamba_d_ssm"] = inner
    if "state_size" in settings and "num_heads" in settings:
        shrunk |= {"num_heads": 4, "head_dim": inner // 4}
    if isinstance(settings.get("linear_num_value_heads"), int):
        keys, values = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
        shrunk |= {
            "linear_num_key_heads": min(keys, 2),
            "linear_num_value_heads": min(keys, 2) * max(1, values // keys),
        }
        width = max(8, sizes.head_width * settings["linear_value_head_dim"] // settings["linear_key_head_dim"])
        shrunk |= {"linear_key_head_dim": sizes.head_width, "linear_value_head_dim": width}


def _experts(shrunk: dict[str, Any], settings: dict[str, Any], sizes: _Sizes) -> None:
    if settings.get("enable_moe_block") is False:
        return
    total = next((settings[n] for n in EXPERTS if isinstance(settings.get(n), int)), 0)
    # An even number, which two ranks share.
    few = 16 if total > 4096 else min(total - total % 2 if total > 2 else total, 8)
    for name in EXPERTS:
        if isinstance(settings.get(name), int):
            shrunk[name] = few
        elif name in settings and settings[name] is None and not settings.get("first_k_dense_replace"):
            shrunk[name] = few = 4
    for name in CHOSEN:
        if name in settings and settings[name] is None:
            shrunk[name] = 2
        if isinstance(settings.get(name), int):
            shrunk[name] = max(1, min(settings[name], 3 if few >= 8 else 2, few))
    for name in GROUPS:
        if isinstance(settings.get(name), int) and settings[name] > 1:
            groups = min(settings[name], 4)
            shrunk |= {name: groups, "topk_group": max(1, settings["topk_group"] * groups // settings[name])}


def _layers(shrunk: dict[str, Any], settings: dict[str, Any], sizes: _Sizes) -> None:
    name = next((n for n in LAYERS if isinstance(settings.get(n), int)), None)
    if name is None:
        return
    total = settings[name]
    kinds = {
        key: value
        for key, value in settings.items()
        if isinstance(value, list) and len(value) == total and total > 2 and key not in ("hybrid_layer_ids",)
    }
    is_sparse = _sparse_layers(settings, total)
    layers = _kept_layers({**kinds, "sparse": is_sparse} if is_sparse else kinds, total, settings)
    for key, value in kinds.items():
        shrunk[key] = [value[number] for number in layers]
    if isinstance(settings.get("per_layer_config"), dict):
        shrunk["per_layer_config"] = {
            layers.index(int(number)): {
                name: max(8, sizes.head_width * v // sizes.base) if name == "head_dim" else shrunk.get(name, v)
                for name, v in overrides.items()
            }
            for number, overrides in settings["per_layer_config"].items()
            if int(number) in layers
        }
    if isinstance(settings.get("hybrid_layer_ids"), list):
        shrunk["hybrid_layer_ids"] = [layers.index(n) for n in settings["hybrid_layer_ids"] if n in layers]
    for key in LAYERS:
        if isinstance(settings.get(key), int) and settings[key] == total:
            shrunk[key] = len(layers)
    for key, value in _numbered(settings, total).items() if total > len(layers) else ():
        shrunk[key] = [layers.index(number) for number in value if number in layers] or [len(layers) - 1]
    if is_sparse:
        dense = [new for new, number in enumerate(layers) if not is_sparse[number]]
        shrunk |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    if isinstance(settings.get("moe_layer_end_index"), int):
        shrunk["moe_layer_end_index"] = len(layers) - 1
    if shared := settings.get("num_kv_shared_layers"):
        shrunk["num_kv_shared_layers"] = sum(number >= total - shared for number in layers)
    if isinstance(settings.get("max_window_layers"), int):
        shrunk["max_window_layers"] = min(settings["max_window_layers"], len(layers) - 1)


def _sparse_layers(settings: dict[str, Any], total: int) -> list[bool]:
    """Return whether each layer has experts, for a type that lists its dense layers and their interval.

    [] for other types.
    """
    listed, step = settings.get("mlp_only_layers"), settings.get("decoder_sparse_step")
    if not (isinstance(listed, list) and isinstance(step, int) and step > 0):
        return []
    return [number not in listed and (number + 1) % step == 0 for number in range(total)]


def _numbered(settings: dict[str, Any], total: int) -> dict[str, list[int]]:
    """Return the settings that list layers by their numbers."""
    return {
        key: value
        for key, value in settings.items()
        if isinstance(value, list)
        and 0 < len(value) < total
        and all(isinstance(number, int) and 0 <= number < total for number in value)
        and "layer" in key
        and key != "hybrid_layer_ids"
    }


def _kept_layers(kinds: dict[str, list[Any]], total: int, settings: dict[str, Any]) -> list[int]:
    """Return layer numbers with every combination of kinds, at least two."""
    shared = settings.get("num_kv_shared_layers") or 0
    first: dict[str, int] = {}
    for number in range(total):
        combination = str([*(value[number] for value in kinds.values()), number >= total - shared])
        first.setdefault(combination, number)
    layers = sorted(first.values())[:MOST_LAYERS]
    if isinstance(settings.get("layers_block_type"), list) and "hybrid" in settings["layers_block_type"]:
        # Zamba's hybrid layers share weights, which needs two of them
        hybrids = [number for number, kind in enumerate(settings["layers_block_type"]) if kind == "hybrid"]
        layers = sorted({*range(hybrids[0] + 2), *hybrids[:2]})
    period = max([1, *(value for name, value in settings.items() if PERIODS.search(name) and isinstance(value, int))])
    if not kinds or (period > 1 and len(layers) < 2):
        layers = list(range(min(total, max(2, min(period, MOST_LAYERS)))))
        for value in _numbered(settings, total).values():
            if not set(value) & set(layers):
                # A listed layer, at the same position within a period.
                stand_in = next(n for n in range(len(layers), total) if n % period == value[0] % period)
                layers = list(range(stand_in + 1))
    if len(layers) < min(2, total):
        layers = sorted({*layers, next(n for n in range(total) if n not in layers)})
    return layers


def _positions(shrunk: dict[str, Any], settings: dict[str, Any], sizes: _Sizes) -> None:
    """Shorten per-frequency lists to the number of frequencies of the smaller heads."""
    width = shrunk.get("qk_rope_head_dim") or shrunk.get("head_dim") or sizes.small // sizes.heads

    def shortened(rope: dict[str, Any]) -> dict[str, Any]:
        rope = dict(rope)
        half = int(width * rope.get("partial_rotary_factor", shrunk.get("partial_rotary_factor") or 1.0)) // 2
        for key, value in rope.items():
            if isinstance(value, dict):
                rope[key] = shortened(value)
            elif key in ("short_factor", "long_factor") and isinstance(value, list):
                rope[key] = value[:half] + [1.0] * max(0, half - len(value))
            elif key == "mrope_section":
                others = len(value) - 1
                share = max(1, half // len(value))
                rope[key] = [half - others * share, *[share] * others]
        return rope

    kinds, original = set[str](), None
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(settings.get(key), dict):
            shrunk[key] = shortened(settings[key])
            for rope in (shrunk[key], *(value for value in shrunk[key].values() if isinstance(value, dict))):
                kinds.add(str(rope.get("rope_type", rope.get("type"))))
                if kinds & LONG and isinstance(rope.get("original_max_position_embeddings"), int):
                    original, rope["original_max_position_embeddings"] = (
                        rope["original_max_position_embeddings"],
                        LENGTH,
                    )
    most = settings.get("max_position_embeddings")
    if not isinstance(most, int):
        return
    if kinds & LONG:
        # Rows on both sides of the length; the ratio of both lengths scales the attention.
        original = settings.get("original_max_position_embeddings", original)
        if isinstance(settings.get("original_max_position_embeddings"), int):
            shrunk["original_max_position_embeddings"] = LENGTH
        if original:
            shrunk["max_position_embeddings"] = max(LENGTH, most * LENGTH // original)
    elif "dynamic" in kinds:
        shrunk["max_position_embeddings"] = LENGTH
    elif not settings.get("rope_parameters"):
        shrunk["max_position_embeddings"] = min(most, 512)


def _tower(shrunk: dict[str, Any], settings: dict[str, Any], sizes: _Sizes) -> None:
    """Shrink a vision tower: measure windows in pixels from its patches, and let the last block stand for all listed
    ones: those with full attention, and those whose outputs later layers of the text part get.
    """
    patch, window = settings.get("patch_size"), settings.get("window_size")
    if isinstance(patch, int) and isinstance(window, int):
        shrunk["window_size"] = min(window, 2 * patch * int(settings.get("spatial_merge_size") or 1))
    for name, value in settings.items():
        if isinstance(settings.get("depth"), int) and name.endswith("_indexes") and isinstance(value, list) and value:
            shrunk[name] = [shrunk["depth"] - 1]
