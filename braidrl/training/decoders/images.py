"""Images in a model's forward pass: the vision tower encodes them, and their embeddings replace those of placeholders.

spans of a row ──placed──▶ positions (T,) or (T, 3), and for each token its row of the encoded images
names ──processor──▶ pixels ──vision tower──▶ embeddings (E, D) ──in place of placeholders──▶ decoder

The text part runs with Braid's attention, the tower with transformers' SDPA, one image at a time: an image's embedding
does not depend on the batch. While the tower is frozen a model caches encoded images.

Shapes: T tokens of a sequence, N tokens packed, E tokens of all images of a forward pass, D model width.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from braidrl.data.rows import Rows
from braidrl.data.vision import ImageSpan, Vision, image_tokens, moved
from braidrl.errors import UserError
from braidrl.training.compute.attention import AttentionContext, parameters_of
from braidrl.training.compute.packed import BLOCKS, Packed
from braidrl.training.decoders.body import TOKENS_RANK, PromptImages, base_of, body_of, plan_of_model, run_body

IMAGES = "images"
"""The name of the images in `Packed.model_inputs`, each once, in the order of their encoded rows."""
IMAGE_ROWS = "image_rows"
"""The values per token (N,) that name a row of the encoded images, counted from 1; 0 for tokens of text."""
SEEN = "encoded_images"
"""Attribute of a model with its `ModelImages`."""


@dataclass(frozen=True)
class Replacement:
    """Embeddings that replace those of an embedding layer's output (1, N, D) at some tokens."""

    positions: Tensor
    embeddings: Tensor


replacing: ContextVar[Replacement | None] = ContextVar("replacing", default=None)
"""The replacement of the current forward pass."""


def replace_embeddings(module: nn.Module, arguments: Any, output: Tensor) -> Tensor | None:
    """Put the embeddings of images into the output of an embedding layer: a forward hook."""
    current = replacing.get()
    if current is None:
        return None
    first = torch.zeros_like(current.positions)
    return output.index_put((first, current.positions), current.embeddings.to(output.dtype))


@dataclass(frozen=True)
class Placed:
    """Positions of the images in packed sequences."""

    positions: Tensor
    """(N,), or (N, 3) for a rope of three axes; they start at 0 in each sequence."""
    rows: Tensor
    """(N,): for tokens of images the row in the encoded images of `names`, counted from 1."""
    names: tuple[str, ...]
    """The images, each once, in the order of their rows."""
    blocks: Tensor | None = None
    """(N,): the number of each token's image in the sequences, 0 for text; None if images do not see each other."""


def images_of(model: Any, vision: Vision, kept_mib: float, tower_changes: bool) -> "ModelImages":
    """Return a model's images, made once: a trainer and an engine that share the model also share its images."""
    images: ModelImages | None = getattr(model, SEEN, None)
    if images is None:
        images = ModelImages(model, vision, kept_mib * 2**20, tower_changes)
        setattr(model, SEEN, images)
    return images


@dataclass(eq=False)
class ModelImages:
    """One model's encoded images."""

    model: Any
    vision: Vision
    kept_bytes: float
    tower_changes: bool = False
    """True if the tower is trained, here or by the trainer that sends weights to this model."""
    encoded_count: int = 0
    """Images that the tower has encoded."""
    _cached: OrderedDict[str, list[Tensor]] = field(default_factory=OrderedDict)
    _cached_bytes: int = 0

    def __post_init__(self) -> None:
        """Raise UserError for a model whose forward pass takes no images."""
        if plan_of_model(self.model).by_rows:
            raise UserError(
                f"model: {type(self.model).__name__} runs with transformers' own attention, and images need packed "
                "rows; leave images out of the data"
            )
        body_of(self.model).embedding.register_forward_hook(replace_embeddings)

    def clear(self) -> None:
        """Forget the encoded images, after the tower's weights have changed."""
        self._cached.clear()
        self._cached_bytes = 0

    def placed(self, ids: Tensor, sequence_lengths: Sequence[int], spans: Sequence[ImageSpan]) -> Placed:
        """Return where the images of packed sequences are; `spans` are counted from the first token of all."""
        mask = image_tokens(ids, spans, self.vision.token)
        rows, begins, begin = torch.zeros(len(ids), dtype=torch.int64), dict[str, int](), 1
        blocks = torch.zeros_like(rows) if self.vision.mutual else None
        for number, span in enumerate(spans):
            part = slice(span.start, span.start + span.tokens)
            if blocks is not None:
                blocks[part][mask[part]] = number + 1
            count = int(mask[part].sum())
            if span.name not in begins:
                begins[span.name], begin = begin, begin + count
            rows[part][mask[part]] = torch.arange(begins[span.name], begins[span.name] + count)
        positions, start, starts = list[Tensor](), 0, [span.start for span in spans]
        for length in sequence_lengths:
            end = start + length
            within = moved(spans[bisect_left(starts, start) : bisect_left(starts, end)], -start)
            positions.append(self.positions(ids[start:end], mask[start:end], within))
            start = end
        return Placed(torch.cat(positions), rows, tuple(begins), blocks)

    def place(self, packed: Packed, rows: Rows) -> Packed:
        """Return a packing of rows with the positions and inputs of their images."""
        offsets, spans = rows["tokens"].offsets.tolist(), list[ImageSpan]()
        for begin, of_row in zip(offsets, rows["images"], strict=False):
            spans += moved(of_row, begin)
        placed = self.placed(packed.input_ids, packed.sequence_lengths, spans)
        per_token = {**packed.per_token, "position_ids": placed.positions, IMAGE_ROWS: placed.rows}
        per_token |= {} if placed.blocks is None else {BLOCKS: placed.blocks}
        return replace(packed, per_token=per_token, model_inputs={**packed.model_inputs, IMAGES: placed.names})

    def positions(self, ids: Tensor, mask: Tensor, spans: Sequence[ImageSpan]) -> Tensor:
        """Return the positions of one sequence, (T,) or (T, 3), as the model's rope counts them.

        `spans` are counted from its first token.
        """
        base = base_of(self.model)
        if not hasattr(base, "get_rope_index"):
            return torch.arange(len(ids))
        if not spans:
            return torch.arange(len(ids))[:, None].expand(-1, 3)
        grids = torch.cat([self.vision.grid(span.name) for span in spans])
        # Adjacent images would count as one there: a text token is inserted between them, and its position is removed
        # afterwards.
        touching = [span.start for span in spans if span.start and bool(mask[span.start - 1 : span.start + 1].all())]
        first, *later_parts = torch.arange(len(ids)).tensor_split(touching)
        source = torch.cat([first, *(pad(part, (1, 0), value=-1) for part in later_parts)])
        is_token = source >= 0
        types = (mask[source] & is_token)[None].int()
        counted, _ = base.get_rope_index(ids[source][None], mm_token_type_ids=types, image_grid_thw=grids)
        return (counted[:, 0].T - (~is_token).cumsum(0)[:, None])[is_token].contiguous()

    def encoded(self, names: Sequence[str]) -> list[Tensor]:
        """Return the embeddings (E, D) of images, in order, and those that the model adds after its first layers."""
        parts = [self._encoded(name) for name in names]
        return [torch.cat(level) for level in zip(*parts, strict=True)]

    def _encoded(self, name: str) -> list[Tensor]:
        if name in self._cached:
            self._cached.move_to_end(name)
            return self._cached[name]
        with torch.set_grad_enabled(self.tower_changes and torch.is_grad_enabled()):
            embeddings = self.encode(name)
        expected = self.vision.expansion(name).count(self.vision.token)
        if any(len(level) != expected for level in embeddings):
            raise UserError(
                f"the image {self.vision.store.path(name)} has {len(embeddings[0])} embeddings for {expected} tokens; "
                "take the image processor of this model"
            )
        self.encoded_count += 1
        if not self.tower_changes:
            self._cached[name] = embeddings
            self._cached_bytes += sum(level.nbytes for level in embeddings)
            while self._cached_bytes > self.kept_bytes and len(self._cached) > 1:
                _, oldest = self._cached.popitem(last=False)
                self._cached_bytes -= sum(level.nbytes for level in oldest)
        return embeddings

    def encode(self, name: str) -> list[Tensor]:
        """Run the vision tower on one image; return its embeddings (T, D), and those for later layers."""
        base = base_of(self.model)
        accepted = parameters_of(type(base).get_image_features)
        inputs = self.vision.pixels(name)
        pixels = {key: value.to(self.model.device) for key, value in inputs.items() if key in accepted}
        for key, value in pixels.items():
            if value.is_floating_point():
                pixels[key] = value.to(self.model.dtype)
        output = base.get_image_features(**pixels)
        pooled, later = output.pooler_output, getattr(output, "deepstack_features", None) or []
        return [joined(pooled), *map(joined, later)]

    def run_packed(self, packed: Packed) -> Tensor:
        """Return the last hidden states (1, N, D) of packed rows."""
        rows = packed.per_token[IMAGE_ROWS]
        with self.seeing(rows, packed.model_inputs[IMAGES]) as options:
            ids = self.text_ids(packed.input_ids, rows)[None]
            return run_body(self.model, ids, packed.rope_positions, packed.attention(), **options)

    def text_ids(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return ids (N,) for the text part: if each layer has inputs by token (Gemma 4), an image's are padding."""
        text = self.model.config.get_text_config()
        if not getattr(text, "hidden_size_per_layer_input", None):
            return ids
        return ids.masked_fill(rows > 0, text.pad_token_id or 0)

    def of_prompts(self, prompts: Sequence[Tensor], images: Sequence[Sequence[ImageSpan]]) -> PromptImages | None:
        """Return the images of packed prompts without their last tokens; None if there are none.

        Raises UserError for a prompt that ends within an image whose tokens see each other.
        """
        if not any(images):
            return None
        spans, begin = list[ImageSpan](), 0
        for prompt, of_prompt in zip(prompts, images, strict=True):
            if self.vision.mutual and any(span.start + span.tokens > len(prompt) for span in of_prompt):
                raise UserError("a prompt ends with an image, whose tokens see each other; let text follow it")
            spans += moved(of_prompt, begin)
            begin += len(prompt)
        placed = self.placed(torch.cat(list(prompts)), [len(prompt) for prompt in prompts], spans)

        def run(model: Any, ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
            # Tokens after the prompts are filler.
            filler = ids.shape[1] - begin
            rows = pad(placed.rows, (0, filler)).to(ids.device)
            axes = placed.positions if placed.positions.dim() == 2 else placed.positions[:, None]
            of_filler = positions[0, begin:, None].cpu().expand(-1, axes.shape[1])
            all_axes = torch.cat([axes, of_filler]).T[:, None].to(ids.device)
            with self.seeing(rows, placed.names) as options:
                return run_body(
                    model, self.text_ids(ids, rows), all_axes if len(all_axes) > 1 else all_axes[0], context, **options
                )

        return PromptImages(run, placed.blocks)

    @contextmanager
    def seeing(self, rows: Tensor, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Insert the images into a forward pass of tokens whose `image_rows` are `rows` (N,).

        Yields further arguments of the decoder.
        """
        if not names:
            yield {}
            return
        rank, ranks = getattr(body_of(self.model).embedding, TOKENS_RANK, (0, 1))
        rows = rows.chunk(ranks)[rank]
        embeddings, *later = self.encoded(names)
        positions = rows.nonzero().flatten()
        chosen = rows[positions] - 1
        options: dict[str, Any] = {}
        if later:
            options = {"visual_pos_masks": (rows > 0)[None], "deepstack_visual_embeds": [e[chosen] for e in later]}
        token = replacing.set(Replacement(positions, embeddings[chosen]))
        try:
            yield options
        finally:
            replacing.reset(token)


def joined(features: Any) -> Tensor:
    """Return the features of one image, (T, D), from a tensor (..., D) or several."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([part.flatten(0, -2) for part in parts])
