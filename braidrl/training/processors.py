"""The image processor of a model's folder, as `Vision`, or the reason why the model takes no images.

A folder without an image processor is answered without importing transformers' processors and models.
"""

import importlib.util
import sys
from functools import lru_cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers

from braidrl.config import ImagesConfig
from braidrl.data.images import ImageStore
from braidrl.data.vision import FAMILIES, IMAGE_PROCESSORS, WRITTEN, Vision, has_image_processor
from braidrl.errors import UserError
from braidrl.training.model_settings import read_object
from braidrl.training.pretrained import load_tokenizer, named_error, read_model_config


def load_vision(path: Path, images: ImagesConfig) -> Vision | None:
    """Return the vision of a model, or None for a text-only model; `no_vision_reason` says why.

    Raises UserError for sizes that its image processor does not support.
    """
    vision = _vision(path, images)
    return vision if isinstance(vision, Vision) else None


def no_vision_reason(path: Path, images: ImagesConfig) -> str:
    """Return why a model takes no images; empty text if it does."""
    vision = _vision(path, images)
    return vision if isinstance(vision, str) else ""


@lru_cache(maxsize=8)
def _vision(path: Path, images: ImagesConfig) -> Vision | str:
    """Return a model's vision, or the reason why images are not supported."""
    folder = path.expanduser()
    if not has_image_processor(folder):
        return "its folder has no image processor"
    config = read_model_config(folder)
    if getattr(config, "vision_config", None) is None:
        return f"{config.model_type} has no vision tower"
    if importlib.util.find_spec("PIL") is None:
        return "Pillow is not installed; run `pip install pillow`"
    # The proof imports transformers' model code, which a model without an image processor does not need.
    from braidrl.training.decoders.image_proof import image_support

    seeing = image_support(config)
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
    # Processors import transformers' model code, which a model without one does not need.
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name
    from transformers.processing_utils import ProcessorMixin
    from transformers.utils.import_utils import DummyObject

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
