"""Loaders of decoders, scalar models and tokenizers from a Hugging Face directory, without downloads."""

import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name
from transformers.processing_utils import ProcessorMixin
from transformers.utils.import_utils import DummyObject

from braidrl.config import ImagesConfig
from braidrl.config.paths import model_folder
from braidrl.data.chat import check_template
from braidrl.data.images import ImageStore
from braidrl.data.vision import FAMILIES, IMAGE_PROCESSORS, WRITTEN, Vision
from braidrl.errors import UserError, located, shown
from braidrl.native.linear import use_fast_products
from braidrl.parsing import read_json
from braidrl.training.decoders.body import ForwardPlan, disable_dropout, use_plan
from braidrl.training.decoders.image_proof import sight
from braidrl.training.decoders.proof import proven_plan
from braidrl.weights.checkpoint_files import HEAD, ParameterReader, WeightFiles
from braidrl.weights.model_files import ModelFiles, auto_class, scorer_class

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
CONFIG_BYTES, TOKENIZER_BYTES = 16 << 20, 512 << 20
SIZES = {
    "num_hidden_layers": 1000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 32,
}
"""Positive integers in a model's config.json, with their upper limits."""
NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
"""Sizes that must not be null."""
POSITIVE = ("rms_norm_eps", "layer_norm_eps", "rope_theta", "initializer_range")
DEQUANTISED = ("fp8", "mxfp4")
"""Quantisation formats that are dequantised on loading."""
_WARNED: set[Path] = set()
"""Folders with code of their own that this process has named."""
logger = logging.getLogger(__name__)


def load_decoder(
    path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", on_meta: bool = False
) -> transformers.PreTrainedModel:
    """Load the causal decoder of a Hugging Face directory, with Braid's attention.

    With `on_meta`, parameters stay on the meta device for `ParameterReader`, if the model can be built without weights.
    Raises UserError if the folder is missing or incomplete, or its model is not supported.
    """
    model, _ = _load(auto_class, path, dtype, on_meta)
    return model if next(model.parameters()).is_meta else model.to(device)


def load_scorer(
    path: str | Path, dtype: torch.dtype = torch.float32, fresh_head: bool = True, on_meta: bool = False
) -> transformers.PreTrainedModel:
    """Load a decoder with a scalar head, from a sequence-classification directory or a causal decoder's; see
    `load_decoder`.

    With `fresh_head` a missing head is zero-initialised, so that every value and score starts at 0. Without it a
    missing head raises UserError.
    """
    check_scorer(path, fresh_head)
    model, has_head = _load(scorer_class, path, dtype, on_meta, optional=HEAD)
    if not hasattr(model, "score"):
        raise UserError(
            f"model: {type(model).__name__} in {path} has no linear `score` head, so it cannot be a critic or reward "
            "model"
        )
    if not has_head:
        torch.nn.init.zeros_(model.score.weight)
    return model


def has_score_head(path: str | Path) -> bool:
    """Return True if a folder holds a model with a scalar head, without reading weights."""
    file = Path(path).expanduser() / "config.json"
    names = json.loads(file.read_text(encoding="utf-8")).get("architectures") if file.is_file() else ()
    return any(name.endswith("ForSequenceClassification") for name in names or ())


def check_scorer(path: str | Path, fresh_head: bool, key: str = "model") -> None:
    """Raise UserError, with `key`, if a folder cannot provide a model with a scalar head; reads no weights."""
    config = read_model_config(path)
    if has_score_head(path):
        if config.num_labels != 1:
            raise UserError(
                f"{key}: {path} classifies into {config.num_labels} labels; a critic or reward model has one "
                "(num_labels: 1)"
            )
    elif not fresh_head:
        raise UserError(
            f"{key}: {path} has no trained score head; train one by the recipe reward_model, and give its directory "
            f"as {key}; "
            "with algorithm.reward=verify the recipe ppo needs none"
        )


def check_model(path: str | Path) -> None:
    """Raise UserError if a model's architecture is not supported, or a weight file is damaged or truncated; loads no
    weights.
    """
    folder, config = Path(path).expanduser(), read_model_config(path)
    without_quantisation(config, folder)
    proven_plan(config, folder)
    WeightFiles(folder)


def _load(
    class_of: Callable[[Any], Any], path: str | Path, dtype: torch.dtype, on_meta: bool, optional: str = ""
) -> tuple[transformers.PreTrainedModel, bool]:
    """Return the model, prepared for its plan, and whether the files hold its `optional` weight; `class_of` finds the
    class of a configuration.

    Raises UserError if others are missing.
    """
    folder = model_folder(path, with_weights=True)
    config = read_model_config(folder)
    plan, quantised = proven_plan(config, folder), without_quantisation(config, folder)
    auto = class_of(config)
    if optional == HEAD:
        config.num_labels = 1
    model: Any = None
    missing = set[str]()
    if on_meta or quantised:
        model, is_complete = skeleton(auto, folder, config, plan, dtype)
        files = ModelFiles(folder, model)
        missing = {name for name, _ in model.named_parameters()} - set(files)
        if quantised and not is_complete:
            raise UserError(
                f"model: {folder} is quantised, and {type(model).__name__} has to be loaded in full; save it without"
            )
        if not is_complete or (missing - {HEAD} and not quantised):
            model = None
        else:
            read_buffers(model, files)
            if not on_meta and missing <= {HEAD}:
                ParameterReader(folder, model, files=files)(model)
    if model is None:
        # Silence transformers' table of missing weights: relevant ones are reported in one line. The handlers are
        # silenced: a new level of the logger would clear the caches of thousands of loggers.
        handlers = [(handler, handler.level) for handler in logging.getLogger("transformers").handlers]
        for handler, _ in handlers:
            handler.setLevel(logging.ERROR)
        try:
            model, loaded = auto.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=plan.attention,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:
            raise UserError(f"model: {folder} cannot be loaded: {named_error(error)}") from error
        finally:
            for handler, level in handlers:
                handler.setLevel(level)
        missing = set(loaded["missing_keys"])
        with_one_type(model, dtype)
    use_fast_products(model)
    use_plan(model, plan)
    if lacking := sorted(missing - {optional}):
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise UserError(f"model: the weights in {folder} lack {', '.join(lacking[:3])}{more}; copy the whole model")
    return model, not missing


def with_one_type(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give all parameters one dtype: transformers keeps some in float32, and sharding needs equal dtypes."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def skeleton(auto: Any, folder: Path, config: Any, plan: ForwardPlan, dtype: torch.dtype) -> tuple[Any, bool]:
    """Return a model with parameters on the meta device, and whether all buffers without a file could be rebuilt."""
    try:
        with torch.device("meta"):
            model: Any = auto.from_config(config, dtype=dtype, attn_implementation=plan.attention)
    except Exception as error:  # any type: the library computes with unchecked values of the file
        raise UserError(f"model: {folder} cannot be loaded: {named_error(error)}") from error
    with_one_type(model, dtype)
    # A class may initialise a parameter by a function without a device argument: it is read like the others.
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not parameter.is_meta:
                setattr(part, name, torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad))
    is_complete = rebuild_buffers(model)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model, is_complete


def without_quantisation(config: Any, folder: Path) -> bool:
    """Remove a supported quantisation from a configuration; return True if it had one.

    Raises UserError for another format.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return False
    kind = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    if str(getattr(kind, "value", kind)) not in DEQUANTISED:
        raise UserError(
            f"model: {folder} is quantised by {kind}; give weights that are saved in full, in fp8 or in mxfp4"
        )
    del config.quantization_config
    return True


@torch.no_grad()
def rebuild_buffers(model: Any) -> bool:
    """Rebuild the non-persistent buffers of a model on the meta device by transformers' own initialization; return
    whether all were set.
    """
    buffers: list[torch.Tensor] = []
    parts: dict[str, None] = {}
    for name, buffer in list(model.named_non_persistent_buffers()):
        if buffer.is_meta:
            owner, _, buffer_name = name.rpartition(".")
            unset = float("nan") if buffer.is_floating_point() else 0
            buffers.append(torch.full(buffer.shape, unset, dtype=buffer.dtype))
            model.get_submodule(owner).register_buffer(buffer_name, buffers[-1], persistent=False)
            parts |= dict.fromkeys(owner.rsplit(".", up)[0] for up in range(owner.count(".") + 1))
    try:
        for part in (*parts, "") if buffers else ():
            model._init_weights(model.get_submodule(part))
    except AttributeError:  # gemma3n's initialization names attributes that its model lacks; it is loaded in full
        return False
    return not any(bool(buffer.isnan().any()) for buffer in buffers if buffer.is_floating_point())


def read_buffers(model: Any, files: Mapping[str, torch.Tensor]) -> None:
    """Read the buffers of a model on the meta device from its files; buffers are small and not sharded."""
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta and name in files:
            owner, _, buffer_name = name.rpartition(".")
            model.get_submodule(owner).register_buffer(buffer_name, files[name].to(buffer.dtype, copy=True))


def load_tokenizer(path: str | Path) -> transformers.PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face directory. Raises UserError if it is missing or invalid."""
    folder = model_folder(path)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise UserError(
            f"model: {folder} has no tokenizer (tokenizer.json); copy it there from where the model is from"
        )
    read_model_config(folder)
    if any((folder / name).is_file() and (folder / name).stat().st_size > TOKENIZER_BYTES for name in TOKENIZER_FILES):
        raise UserError(f"model: the tokenizer in {folder} has more than {TOKENIZER_BYTES} bytes, which are not read")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer.get_vocab()
        if not isinstance(tokenizer.model_max_length, int | float):
            raise TypeError(f"model_max_length is {shown(tokenizer.model_max_length)}, and no number")
        return tokenizer
    except BaseException as error:
        # A panic of the tokenizers library (Rust) is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        for path in sorted(folder.glob("*token*.json")):
            read_object(path, TOKENIZER_BYTES)
        raise UserError(f"model: the tokenizer in {folder} cannot be loaded: {named_error(error)}") from error


def load_vision(path: Path, images: ImagesConfig) -> Vision | None:
    """Return the vision of a model, or None for a text-only model; `blind_because` says why.

    Raises UserError for sizes that its image processor does not support.
    """
    vision = _vision(path, images)
    return vision if isinstance(vision, Vision) else None


def blind_because(path: Path, images: ImagesConfig) -> str:
    """Return why a model takes no images; empty text if it does."""
    vision = _vision(path, images)
    return vision if isinstance(vision, str) else ""


@lru_cache(maxsize=8)
def _vision(path: Path, images: ImagesConfig) -> Vision | str:
    """Return a model's vision, or the reason why images are not supported."""
    folder = path.expanduser()
    if not any((folder / name).is_file() for name in IMAGE_PROCESSORS):
        return "its folder has no image processor"
    config = read_model_config(folder)
    if getattr(config, "vision_config", None) is None:
        return f"{config.model_type} has no vision tower"
    if importlib.util.find_spec("PIL") is None:
        return "Pillow is not installed; run `pip install pillow`"
    seeing = sight(config)
    if seeing.refused:
        return f"{config.model_type} is not proven to see rightly: {seeing.refused}"
    family, tokenizer = FAMILIES.get(config.model_type, WRITTEN), load_tokenizer(folder)
    token, joined, options = config.image_token_id, None, dict[str, Any]()
    text = tokenizer.convert_ids_to_tokens(token)
    try:
        # The processors on Pillow need no torchvision.
        processor = transformers.AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
        if family.is_written:
            joined, options = text_processor(folder, config, processor, tokenizer)
            text = joined.image_token
    except Exception as error:  # of any type: the library computes with unchecked files, and packages may be missing
        return f"its processor cannot be made: {named_error(error)}"
    placeholder = tokenizer.convert_tokens_to_ids(text) if text is not None else None
    if placeholder is None or placeholder == tokenizer.unk_token_id:
        return f"its tokenizer has no token {token} for images; copy the model's own"
    bounds = {"shortest_edge": images.min_pixels, "longest_edge": images.max_pixels}
    if named := {key: value for key, value in bounds.items() if value is not None}:
        if not family.resizes:
            raise UserError(
                f"data.images.min_pixels and max_pixels: the image processor of {config.model_type} has sizes of its "
                "own; remove them"
            )
        processor.size = {**dict(processor.size), **named}
        if processor.size["shortest_edge"] > processor.size["longest_edge"]:
            raise UserError(f"data.images: {processor.size} allows no size; write min_pixels below max_pixels")
    return Vision(
        family,
        processor,
        ImageStore.of(images),
        token,
        text,
        placeholder,
        joined,
        options,
        skips_broken=images.broken == "skip",
        mutual=seeing.mutual,
        described=f"{processor.to_json_string()} {token} {text} {config.model_type} {config.vision_config}",
    )


def written_by(config: Any, named: str | None = None) -> Any:
    """Return the processor class of a model type, or the class `named` in its folder.

    Raises TypeError if it writes no text for images.
    """
    kind: Any = PROCESSOR_MAPPING.get(type(config), None)
    if kind is None:
        kind = processor_class_from_name(named) if named else None
    if kind is None:
        raise TypeError(f"transformers has no processor of {config.model_type}, and the folder names none")
    if isinstance(kind, DummyObject):
        kind = getattr(imported_on_pillow(kind.__module__), kind.__name__)
    if not hasattr(kind, "replace_image_token") or kind.replace_image_token is ProcessorMixin.replace_image_token:
        raise TypeError(f"{kind.__name__} writes no text for an image")
    return kind


def imported_on_pillow(module: str) -> Any:
    """Import a processor's module that needs only functions common to torchvision's and Pillow's image processors."""
    package, _, family = module.rpartition(".")
    name = family.removeprefix("processing_")
    torchvisions, pillows = f"{package}.image_processing_{name}", f"{package}.image_processing_pil_{name}"
    if torchvisions in sys.modules or importlib.util.find_spec(pillows) is None:
        return import_module(module)
    sys.modules[torchvisions] = import_module(pillows)
    try:
        return import_module(module)
    finally:
        del sys.modules[torchvisions]


def named_processor(folder: Path) -> str | None:
    """Return the name of the processor's class in a model's folder."""
    for file in (*IMAGE_PROCESSORS[::-1], "tokenizer_config.json"):
        if (folder / file).is_file() and isinstance(name := read_object(folder / file).get("processor_class"), str):
            return name
    return None


def text_processor(folder: Path, config: Any, image_processor: Any, tokenizer: Any) -> tuple[Any, dict[str, Any]]:
    """Return the processor of a model's family, without one for videos, which would need torchvision, and its arguments
    for the image processor.
    """
    kind = written_by(config, named_processor(folder))
    settings, _ = kind.get_processor_dict(folder, local_files_only=True)
    accepted = signature(kind.__init__).parameters.keys() - {"self", "image_processor", "tokenizer", "chat_template"}
    arguments = {name: value for name, value in settings.items() if name in accepted and not isinstance(value, dict)}
    arguments |= {"video_processor": SimpleNamespace()} if "video_processor" in accepted else {}
    without_video = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    defaults = getattr(getattr(kind, "valid_processor_kwargs", None), "_defaults", {})
    options = {"return_tensors": "pt", **defaults.get("images_kwargs", {})}
    return without_video(image_processor=image_processor, tokenizer=tokenizer, **arguments), options


def check_tokens(model: str | Path, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Raise UserError if an end token of a model or of the tokenizer is not in its vocabulary, or its chat template is
    invalid.
    """
    folder = model_folder(model)
    config, path, settings = read_model_config(folder), folder / "generation_config.json", None
    if path.is_file():
        read_object(path)
        try:
            settings = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
        except Exception as error:
            raise UserError(f"model: {path} cannot be read: {named_error(error)}") from error
    with located(f"model: {folder}"):
        check_template(tokenizer)
    size = getattr(config, "vocab_size", None)
    if size is None:
        return
    named = {
        "config.json": config.eos_token_id,
        "generation_config.json": settings,
        "the tokenizer": tokenizer.eos_token_id,
    }
    for origin, ends in named.items():
        for end in ends if isinstance(ends, list | tuple) else [ends]:
            if end is not None and not (type(end) is int and 0 <= end < size):
                raise UserError(
                    f"model: {folder}: eos_token_id of {origin} is {shown(end)}, and the model has the tokens 0 to "
                    f"{size - 1}; "
                    "responses could not end: write the right one"
                )


def read_model_config(path: str | Path) -> Any:
    """Read a model's config.json, without weights. Raises UserError as `load_decoder`."""
    folder = model_folder(path)
    path = folder / "config.json"
    settings = read_object(path)
    # Invalid or inconsistent sizes of the model or of its parts are refused before a model is built.
    for about in (
        settings,
        *(part for part in settings.values() if isinstance(part, dict) and {"hidden_size", "rope_theta"} & set(part)),
    ):
        for name, most in SIZES.items():
            value = about.get(name, 1)
            if value is None and name not in NEEDED:
                continue
            # Some types have a width for each layer.
            several = value if isinstance(value, list) and name not in NEEDED else [value]
            if not several or not all(type(number) is int and 1 <= number <= most for number in several):
                raise UserError(f"model: {path}: {name} is {shown(value)}; it must be a whole number from 1 to {most}")
        # A type may have its heads under another name, as Dbrx and GPT-2 do.
        heads, per_group = about.get("num_attention_heads"), about.get("num_key_value_heads")
        if heads and isinstance(per_group, int) and heads % per_group:
            raise UserError(
                f"model: {path}: num_key_value_heads {per_group} does not divide num_attention_heads {heads}"
            )
        for name in POSITIVE:
            value = about.get(name, 1.0)
            if value is None:  # a type that names another one
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
                raise UserError(f"model: {path}: {name} is {shown(value)}; it must be a number above 0")
        names = about.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"model: {path}: architectures is {shown(names)}; it must be a list of names")
        if heads and not about.get("head_dim") and about.get("hidden_size", heads) % heads:
            raise UserError(
                f"model: {path}: num_attention_heads {heads} does not divide hidden_size {about['hidden_size']}"
            )
    try:
        config = deepcopy(_parsed_config(folder, path.read_bytes()))
    except Exception as error:
        remedy = ""
        if settings.get("model_type") not in CONFIG_MAPPING:
            remedy = (
                f"; transformers {transformers.__version__} has no model_type {shown(settings.get('model_type'))}: "
                "install a version that has it (code beside a model is not run)"
            )
        raise UserError(f"model: {folder}/config.json cannot be read: {named_error(error)}{remedy}") from error
    check_own_code(folder, settings, config)
    if random := disable_dropout(config):
        logger.warning("model: %s trains without %s", folder, ", ".join(sorted(set(random))))
    return config


def check_own_code(folder: Path, settings: Mapping[str, Any], config: Any) -> None:
    """Warn that a model's custom code is not run; raise UserError if its class is not one of transformers'."""
    classes = settings.get("auto_map")
    if not isinstance(classes, dict) or not classes:
        return
    auto_classes = [value for key, value in classes.items() if key.startswith("AutoModel")]
    named = [str(name).rpartition(".")[2] for name in (*(settings.get("architectures") or ()), *auto_classes)]
    strange = [name for name in named if not hasattr(transformers, name)]
    if strange:
        raise UserError(
            f"model: {folder}/config.json names a class of its own, {strange[0]}, in auto_map, and Braid runs no code "
            f"beside a model; if it computes as {config.model_type} of transformers does, remove auto_map and name "
            "that class in architectures"
        )
    if folder not in _WARNED:
        _WARNED.add(folder)
        logger.warning(
            "model: %s brings code of its own (auto_map), which is not run: it is computed as %s of transformers",
            folder,
            config.model_type,
        )


@lru_cache(maxsize=64)
def _parsed_config(folder: Path, text: bytes) -> Any:
    """Return the configuration of a folder whose config.json holds this text; cached, as a run's start reads it a dozen
    times.
    """
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def read_object(path: Path, most_bytes: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file of a model's folder. Raises UserError for other content."""
    settings = read_json(path, most_bytes, finite=False)
    if not isinstance(settings, dict):
        raise UserError(f"{path} holds no object; copy the whole model")
    return settings


def named_error(error: BaseException) -> str:
    """Return a library's error in one line, with its type if the text alone is unclear."""
    text = shown(" ".join(str(error).split()))[1:-1]
    return text if isinstance(error, ValueError | OSError | RuntimeError) else f"{type(error).__name__}: {text}"


def model_settings(model: Path) -> Mapping[str, Any]:
    """Return the settings of a model's text part, including the names that transformers' models share; empty without a
    directory.
    """
    path = model.expanduser() / "config.json"
    if not path.is_file():
        return {}
    settings = read_object(path)
    settings |= settings.get("text_config") or {}
    kind = settings.get("model_type")
    families = transformers.CONFIG_MAPPING
    shared = families[kind].attribute_map if kind in families else {}
    return {**settings, **{name: settings[key] for name, key in shared.items() if key in settings}}
