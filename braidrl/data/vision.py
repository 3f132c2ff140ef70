"""A model's image processing: its image processor, and the tokens of an image, by model family.

messages ──chat template──▶ text with one placeholder per image ──tokenizer──▶ ids ──Vision.expand──▶ ids, spans
image ──image processor──▶ pixels, as the vision tower takes them

Rows keep spans: which image, and where its tokens are. Sampled tokens are never images, even with an image's token id.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from braidrl.data.images import KNOWN, BrokenImage, ImageStore
from braidrl.data.rows import Column, Objects
from braidrl.deferred import Tensor, torch
from braidrl.errors import UserError, first_line


class ImageSpan(NamedTuple):
    """The tokens of one image in a row: those of its id in [start, start + tokens)."""

    name: str
    start: int
    tokens: int


IMAGE_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
PROCESSOR_FILES = (*IMAGE_PROCESSORS, "video_preprocessor_config.json")
"""Files of a model's folder with an image processor, and all that a processor consists of besides the tokenizer."""
GRID = "image_grid_thw"
IMAGE_TOKENS = "image_tokens"
"""The index column of a row's tokens that stand for images, by which schedulers count the vision tower's work."""
IMAGE_COLUMNS = ("images", IMAGE_TOKENS)
"""The columns of rows for a model that sees."""
Expansion = Callable[["Vision", str], list[int]]
"""Returns the ids that stand for an image, given its name."""


def has_image_processor(folder: Path) -> bool:
    """Return False for a model's folder without an image processor: the model takes no images."""
    return any((folder.expanduser() / name).is_file() for name in IMAGE_PROCESSORS)


@dataclass(frozen=True)
class VisionFamily:
    """The image processing of the models of a type."""

    expansion: Expansion
    is_written: bool = True
    """True if the processor of transformers writes the text of an image."""
    resizes: bool = False
    """True if the image processor keeps proportions, between a least and a largest number of pixels."""


def merged_patches(vision: "Vision", name: str) -> list[int]:
    """Return one token for each square of `merge_size` patches, by the image's size alone: Qwen-VL."""
    height, width = vision.store.size(name)
    patches = vision.processor.get_number_of_image_patches(height, width, {})
    return [vision.token] * (patches // vision.processor.merge_size**2)


def written(vision: "Vision", name: str) -> list[int]:
    """Return the tokens of the text that transformers' processor writes for an image: tiles, rows, delimiters."""
    _, (text,) = vision.text_processor._process_images([vision.store.open(name)], **vision.options)
    ids: list[int] = vision.text_processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


WRITTEN = VisionFamily(written)
"""Any type whose processor of transformers writes the text of an image, and that is proven to see rightly."""
FAMILIES: dict[str, VisionFamily] = dict.fromkeys(
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    VisionFamily(merged_patches, is_written=False, resizes=True),
)
"""Types whose images are counted by their sizes alone, or otherwise than others, by the `model_type` of config.json."""


@dataclass(frozen=True, eq=False)
class Vision:
    """The image processor of a model, joined with its tokenizer's placeholder."""

    family: VisionFamily
    processor: Any
    """An image processor of transformers."""
    store: ImageStore
    token: int
    """The id of the tokens that an image's embeddings replace."""
    placeholder: str
    """The text that chat templates write for an image."""
    placeholder_token: int
    text_processor: Any = None
    """The processor of transformers that joins the image processor and the tokenizer, without a video processor."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the image processor that the family's processor passes."""
    skips_broken: bool = False
    mutual: bool = False
    """True if the tokens of an image see each other in both directions in the text part, as in Gemma 3."""
    described: str = ""
    """All settings that affect tokens and pixels, as text."""
    _expansions: dict[str, list[int]] = field(default_factory=dict)
    _grids: dict[str, Tensor] = field(default_factory=dict)

    def expansion(self, name: str) -> list[int]:
        """Return the ids that replace an image's placeholder.

        Raises BrokenImage if the processor does not support its form.
        """
        ids = self._expansions.get(name)
        if ids is None:
            try:
                ids = self.family.expansion(self, name)
            except ValueError as error:
                raise BrokenImage(f"the image {name}: {first_line(error)}") from None
            keep(self._expansions, name, ids)
        return ids

    def expand(self, ids: Sequence[int], names: Sequence[str]) -> tuple[list[int], list[ImageSpan]]:
        """Return ids in which each placeholder is replaced by the tokens of the next image, and the images' spans.

        Raises UserError if there are more or fewer placeholders than images.
        """
        positions = [position for position, token in enumerate(ids) if token == self.placeholder_token]
        if len(positions) != len(names):
            raise UserError(
                f"the text has {len(positions)} placeholders {self.placeholder} for {len(names)} images; use a chat "
                "template that writes one for each image, and remove others from the text"
            )
        expanded, spans, done = list[int](), list[ImageSpan](), 0
        for position, name in zip(positions, names, strict=True):
            expanded += ids[done:position]
            tokens = self.expansion(name)
            spans.append(ImageSpan(name, len(expanded), len(tokens)))
            expanded += tokens
            done = position + 1
        return [*expanded, *ids[done:]], spans

    def collapse(self, ids: Sequence[int], spans: Sequence[ImageSpan]) -> list[int]:
        """Replace each image's tokens by one placeholder, the inverse of `expand`, for engines that expand them."""
        collapsed, done = list[int](), 0
        for span in spans:
            collapsed += [*ids[done : span.start], self.placeholder_token]
            done = span.start + span.tokens
        return [*collapsed, *ids[done:]]

    def processed(self, name: str) -> Any:
        """Return the image processor's output for one image. Raises ValueError for an unsupported shape."""
        images = [self.store.open(name)]
        if self.text_processor is not None:
            return self.text_processor._process_images(images, **self.options)[0]
        return self.processor(images=images, return_tensors="pt")

    def resized(self, name: str) -> Any:
        """Return an image in the processor's size, which another program's processor then does not change."""
        image = self.store.open(name)
        if not self.family.resizes:
            return image
        _, rows, columns = self.grid(name)[0].tolist()
        patch = self.processor.patch_size
        return image.resize((columns * patch, rows * patch), resample=self.processor.resample)

    def pixels(self, name: str) -> Mapping[str, Tensor]:
        """Return the image processor's tensors for one image."""
        try:
            tensors = self.processed(name)
        except ValueError as error:
            raise UserError(f"the image {self.store.path(name)}: {first_line(error)}") from None
        pixels = {key: value for key, value in tensors.items() if isinstance(value, Tensor)}
        if GRID in pixels:
            keep(self._grids, name, pixels[GRID])
        return pixels

    def grid(self, name: str) -> Tensor:
        """Return the numbers of an image's patches in time, height and width, (1, 3)."""
        return self._grids[name] if name in self._grids else self.pixels(name)[GRID]


def keep(cache: dict[str, Any], name: str, value: Any) -> None:
    """Cache a value; the oldest is evicted, so that memory is bounded."""
    if len(cache) >= KNOWN:
        del cache[next(iter(cache))]
    cache[name] = value


def image_columns(images: Sequence[Sequence[ImageSpan]]) -> dict[str, Column]:
    """Return the columns of the images of B rows: `images`, their spans, and the index column `image_tokens`, (B,)."""
    spans = Objects(tuple([list(span) for span in of_row] for of_row in images))
    tokens = torch.tensor([sum(span.tokens for span in of_row) for of_row in images], dtype=torch.int64)
    return {"images": spans, IMAGE_TOKENS: tokens}


def untrained_images(trained: Sequence[bool], spans: Sequence[ImageSpan]) -> list[bool]:
    """Return the mask of trained ids after `Vision.expand`: tokens of images are not trained."""
    mask, done = list[bool](), 0
    for span in spans:
        before = span.start - len(mask)
        mask += [*trained[done : done + before], *[False] * span.tokens]
        done += before + 1
    return [*mask, *trained[done:]]


def moved(spans: Sequence[Sequence[Any]], by: int) -> list[ImageSpan]:
    """Return spans, as read from JSON, moved by `by` tokens."""
    return [ImageSpan(str(name), int(start) + by, int(tokens)) for name, start, tokens in spans]


def image_tokens(ids: Tensor, spans: Sequence[ImageSpan], token: int) -> Tensor:
    """Return a mask (T,) of the tokens of images."""
    mask = torch.zeros(len(ids), dtype=torch.bool)
    for span in spans:
        part = slice(span.start, span.start + span.tokens)
        mask[part] = ids[part] == token
    return mask
