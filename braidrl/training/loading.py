"""Loaders of decoders, scalar models and tokenizers from a Hugging Face directory, without downloads."""

import logging
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
import transformers

from braidrl.config.paths import model_folder
from braidrl.errors import UserError
from braidrl.native.linear import use_fast_products
from braidrl.training.decoders.body import ForwardPlan, use_plan
from braidrl.training.decoders.proof import proven_plan
from braidrl.training.model_settings import has_score_head
from braidrl.training.pretrained import check_scorer, named_error, read_model_config, warn_once
from braidrl.weights.checkpoint_files import HEAD, ParameterReader, WeightFiles, of_another_shape
from braidrl.weights.model_files import ModelFiles, auto_class, scorer_class

DEQUANTISED = ("fp8", "mxfp4")
"""Quantisation formats that are dequantised on loading."""


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


def check_model(path: str | Path) -> None:
    """Raise UserError if a model's architecture is not supported, or a weight file is damaged; loads no weights."""
    folder, config = Path(path).expanduser(), read_model_config(path)
    without_quantisation(config, folder)
    warn_of_class(config, folder)
    proven_plan(config, folder)
    WeightFiles(folder)


def unused_weights(path: str | Path) -> list[str]:
    """Return the names of a folder's tensors that its model does not have; reads only the headers of its files.

    Raises UserError if the files lack a tensor of the model, or have one of another shape.
    """
    folder = model_folder(path, with_weights=True)
    config = read_model_config(folder)
    without_quantisation(config, folder)
    auto = scorer_class(config) if has_score_head(folder) else auto_class(config)
    model, _ = skeleton(auto, folder, config, proven_plan(config, folder), torch.float32)
    files = ModelFiles(folder, model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name in sorted(shapes.keys() & set(files)):
        if files.shape(name) != shapes[name]:
            raise of_another_shape(name, folder, files.shape(name), shapes[name])
    check_complete(folder, shapes.keys() - set(files))
    return sorted(source for sources in files.left_out.values() for source in sources)


def check_complete(folder: Path, missing: Set[str]) -> None:
    """Raise UserError, with the names of some, if weights are missing."""
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(
            f"model: the weights in {folder} lack {', '.join(sorted(missing)[:3])}{more}; copy the whole model"
        )


def warn_of_class(config: Any, folder: Path) -> None:
    """Warn if a model's folder names a class of another type than its model_type, which decides."""
    for name in config.architectures or ():
        kind = getattr(getattr(transformers, name, None), "config_class", None)
        if isinstance(kind, type) and not isinstance(config, kind):
            warn_once(
                "model: %s/config.json names %s in architectures, and its model_type %s decides how it is computed",
                folder,
                name,
                config.model_type,
            )


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
                ignore_mismatched_sizes=True,  # its own error does not name them
            )
        except Exception as error:
            raise UserError(f"model: {folder} cannot be loaded: {named_error(error)}") from error
        finally:
            for handler, level in handlers:
                handler.setLevel(level)
        for name, stored, expected in sorted(loaded["mismatched_keys"]):
            raise of_another_shape(name, folder, stored, expected)
        missing = set(loaded["missing_keys"])
        with_one_type(model, dtype)
    use_fast_products(model)
    use_plan(model, plan)
    check_complete(folder, missing - {optional})
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
