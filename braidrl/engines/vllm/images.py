"""Images in prompts for vLLM: Braid's tokens and pixels, in the form that vLLM's processor would return.

ids, spans ──────────────────────────────────────────▶ ranges of placeholders ╮
names ──Braid's processor──▶ pixels ──fields of vLLM's model──▶ tensors ──────┴─▶ a ready input of vLLM's engine

vLLM's processor would tokenize text again, and resize images differently from the trainer. Its cache holds the
tensors of an image, so that they are made and sent once for all samples of a group.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import BatchFeature
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange

from braidrl.data.vision import ImageSpan, Vision
from braidrl.errors import UserError, first_line

IMAGE = "image"
"""vLLM's name of the modality."""


class VllmImages:
    """The images of a vLLM engine's prompts."""

    def __init__(self, vision: Vision, renderer: Any) -> None:
        """`renderer` is the part of vLLM's engine that has its processor and the processor's cache."""
        self._vision, self._processor, self._cache = vision, renderer.get_mm_processor(), renderer.mm_processor_cache

    def check(self, spans: Sequence[ImageSpan]) -> None:
        """Make the tensors of images that are not in vLLM's cache. Raises UserError if vLLM's model takes others."""
        for name in {span.name for span in spans}:
            if self._cache is None or not self._cache.is_cached_item(name):
                self._tensors(name)

    def prompt(self, ids: Tensor, spans: Sequence[ImageSpan], salt: str) -> MultiModalInput:
        """Return a prompt (P,) with expanded images as a ready input for vLLM's engine."""
        ranges = [
            PlaceholderRange(span.start, span.tokens, ids[span.start : span.start + span.tokens] == self._vision.token)
            for span in spans
        ]
        names = [span.name for span in spans]
        items = MultiModalKwargsItems({IMAGE: [self._sent(name) for name in names]})
        return mm_input(ids.tolist(), items, {IMAGE: names}, {IMAGE: ranges}, cache_salt=salt)

    def _sent(self, name: str) -> MultiModalKwargsItem | None:
        """Return the tensors of an image; None if the worker's side of vLLM's cache has them."""
        if self._cache is None:
            return self._tensors(name)
        new = None if self._cache.is_cached_item(name) else (self._tensors(name), ())
        item, _ = self._cache.get_and_update_item(new, name)
        return item

    def _tensors(self, name: str) -> MultiModalKwargsItem:
        pixels = BatchFeature(dict(self._vision.pixels(name)))
        try:
            fields = self._processor._get_mm_fields_config(pixels, {})
            (item,) = MultiModalKwargsItems.from_hf_inputs(pixels, fields)[IMAGE]
        except (KeyError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
            kind = type(self._processor).__name__
            raise UserError(
                f"rollout.engine=vllm: {kind} of vLLM takes other tensors than {', '.join(pixels)}, which the image "
                f"processor makes ({first_line(error)}); write rollout.engine=embedded"
            ) from error
        return item
