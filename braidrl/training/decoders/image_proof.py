"""The proof that images are computed correctly: on a model's tiny twin, rows with images, packed and decoded, equal
single rows of transformers.

random embeddings ─┬─ in place of placeholders, packed rows, prefill and decode ─▶ log-probs ─┬─ equal? ─▶ may see └─
transformers' own forward (`mm_encoder_outputs`), each row alone ───────┘  Embeddings stand for encoded images, so that
the proof needs no pixels: the proof measures positions, later layers that get them too, and whether the tokens of an
image see each other in both directions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import Objects, Rows
from braidrl.data.vision import ImageSpan
from braidrl.errors import first_line
from braidrl.training.compute.attention import parameters_of
from braidrl.training.compute.packed import pack
from braidrl.training.compute.slots import SlotCache, SlotStep
from braidrl.training.decoders.body import ForwardPlan, base_of, decoder_of, non_text_parameters, prefill, run_body
from braidrl.training.decoders.head import logits_of
from braidrl.training.decoders.images import ModelImages
from braidrl.training.decoders.proof import (
    BOUND,
    FAILURES,
    SLOTS,
    Finding,
    Refusal,
    Twin,
    best_plan,
    proof_device,
    quietly,
    remembered,
)

NAME = "rows with images equal rows alone, packed and decoded"
SEEN: Sequence[Sequence[str]] = ((), ("wide",), ("tall", "wide"), (), ("tall", "tall"))
"""The images of each row."""
PATCHES = {"wide": (2, 3), "tall": (3, 1)}
"""Height and width of each image, in tokens."""
TILE = 3
"""Tokens of a tile, which divide those of each image."""
FORMS: Sequence[Callable[[tuple[Tensor, ...]], Any]] = (
    lambda images: images,
    torch.cat,
    lambda images: torch.cat(images).unflatten(0, (-1, TILE)),
)
"""What vision towers return, by family: a tensor (T, D) for each image, one for all, or one of tiles."""
LATER = ("visual_pos_masks", "deepstack_visual_embeds")
"""Parameters of decoders that get images in later layers too."""


@dataclass(frozen=True)
class ProofVision:
    """The part of a `Vision` that `ModelImages` reads, for images that are only embeddings."""

    token: int
    merge: int
    mutual: bool

    def grid(self, name: str) -> Tensor:
        height, width = PATCHES[name]
        return torch.tensor([[1, height * self.merge, width * self.merge]])


@dataclass(frozen=True)
class ImageSupport:
    """A model's measured processing of images."""

    refused: str
    """Why images are not supported; empty text if they are."""
    mutual: bool = False
    """True if the tokens of an image see each other in both directions."""


def image_finding(twin: Twin, plan: ForwardPlan) -> tuple[Finding, bool]:
    """Return the finding on rows with images, and whether the tokens of an image see each other in both directions."""
    causal = Finding.of(NAME, image_distance, twin, plan)
    if causal.holds or causal.note:
        return causal, False
    mutual = Finding.of(NAME, image_distance, twin, plan, True)
    return (mutual, True) if mutual.holds else (causal, False)


@torch.no_grad()
def image_distance(twin: Twin, plan: ForwardPlan, mutual: bool = False) -> tuple[float, float]:
    """Return the greatest difference of log-probs of rows with images, and its bound.

    With `mutual` the tokens of an image see each other in both directions.

    Raises ValueError for a model without a vision tower.
    """
    vocabulary = twin.config.get_text_config().vocab_size
    token = vocabulary - 3
    model = twin.model(plan)
    # Parts of a model may have copies of the configuration.
    for config in (getattr(module, "config", None) for part in (model, twin.reference) for module in part.modules()):
        for name in ("image_token_id", "video_token_id", "audio_token_id"):
            if getattr(config, name, None) is not None:
                setattr(config, name, token if name == "image_token_id" else token + 1)
    base = base_of(model)
    if not non_text_parameters(model) or not hasattr(base, "get_image_features"):
        raise ValueError("no vision tower beside a text part")
    if "mm_encoder_outputs" not in parameters_of(type(base).forward):
        raise ValueError("its forward pass takes no encoded images")
    merge = int(getattr(getattr(twin.config, "vision_config", None), "spatial_merge_size", None) or 1)
    images = ModelImages(model, ProofVision(token, merge, mutual), float("inf"))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(twin.seed)
    width = twin.config.get_text_config().hidden_size
    copies = 1 + (LATER[1] in parameters_of(type(decoder_of(model)).forward))
    for name, (height, across) in PATCHES.items():
        drawn = [torch.randn(height * across, width, generator=generator).to(twin.device) for _ in range(copies)]
        images._cached[name] = drawn
    rows, spans = list[Tensor](), list[list[ImageSpan]]()
    for names in SEEN:
        ids = torch.randint(2, vocabulary - 4, (5 + len(names),), generator=generator).tolist()
        tokens: list[int] = ids[:2]
        placed: list[ImageSpan] = []
        for name, behind in zip(names, ids[5:], strict=True):
            count = PATCHES[name][0] * PATCHES[name][1]
            placed.append(ImageSpan(name, len(tokens), count))
            tokens += [*[token] * count, behind]
        rows.append(torch.tensor([*tokens, *ids[2:5]]))
        spans.append(placed)
    expected = [alone(twin, model, images, row, of_row) for row, of_row in zip(rows, spans, strict=True)]
    packed = packed_logits(model, images, rows, spans)
    decoded = [last_logits(model, images, row, of_row) for row, of_row in zip(rows, spans, strict=True)]
    differences = [
        *((a - b).abs().max() for a, b in zip(packed, expected, strict=True)),
        *((a - b[-1]).abs().max() for a, b in zip(decoded, expected, strict=True)),
    ]
    return float(torch.stack(differences).max()), BOUND


def alone(twin: Twin, model: Any, images: ModelImages, row: Tensor, spans: Sequence[ImageSpan]) -> Tensor:
    """Return the log-probabilities (T, V) of a single row by transformers' forward pass."""
    untouched = twin.untouched()
    base, types = base_of(untouched), torch.zeros_like(row)
    for span in spans:
        types[span.start : span.start + span.tokens] = 1
    levels = [images._cached[span.name] for span in spans]
    options: dict[str, Any] = {"mm_token_type_ids": types[None].int(), "token_type_ids": types[None]}
    if levels:
        options["image_grid_thw"] = torch.cat([images.vision.grid(span.name) for span in spans])
    accepted = parameters_of(type(base).forward)
    options = {name: value for name, value in options.items() if name in accepted}
    errors: list[Exception] = []
    for form in FORMS if levels else FORMS[:1]:
        if levels:
            # Encoded images in the form in which a vision tower returns them.
            parts = [tuple(embeddings) for embeddings in zip(*levels, strict=True)]
            first = form(parts[0])
            encoded = SimpleNamespace(pooler_output=first, last_hidden_state=first, deepstack_features=parts[1:])
            options["mm_encoder_outputs"] = {"image": encoded}
        try:
            hidden = base(input_ids=row[None], use_cache=False, **options).last_hidden_state
            return logits_of(model, hidden[0]).float().log_softmax(-1)
        except FAILURES as error:
            errors.append(error)
    raise errors[0]


def packed_logits(
    model: Any, images: ModelImages, rows: Sequence[Tensor], spans: Sequence[Sequence[ImageSpan]]
) -> list[Tensor]:
    """Return the log-probabilities (T, V) of each of the packed rows."""
    tokens = Ragged.from_rows(list(rows), torch.int64)
    columns: Mapping[str, Any] = {
        "tokens": tokens,
        "action_mask": tokens.with_values(torch.zeros(len(tokens.values), dtype=torch.bool)),
        "sequence_lengths": Ragged.from_lengths(tokens.lengths, torch.ones_like(tokens.lengths)),
        "images": Objects(tuple([list(span) for span in of_row] for of_row in spans)),
    }
    hidden = images.run_packed(pack(Rows(columns), model.device, place_images=images.place))[0]
    return [*logits_of(model, hidden).float().log_softmax(-1).split([len(row) for row in rows])]


def last_logits(model: Any, images: ModelImages, row: Tensor, spans: Sequence[ImageSpan]) -> Tensor:
    """Return the log-probabilities (V,) after a row whose last token is decoded after its prefix."""
    cache, last = SlotCache(SLOTS, model.dtype, model.device), len(row) - 1
    cache.reserve(len(row))
    (prefix,) = prefill(model, [row[:-1]], images=images.of_prompts([row[:-1]], [spans]))
    cache.fill(torch.tensor([0], device=model.device), prefix)
    position = torch.zeros(SLOTS, dtype=torch.int64, device=model.device)
    position[0] = last
    current = torch.zeros_like(position)
    current[0] = row[-1]
    shift = int(images.placed(row, [len(row)], spans).positions[-1].max()) - last
    hidden = run_body(model, current[:, None], (position + shift)[:, None], SlotStep(cache, position, len(row)))
    return logits_of(model, hidden[:1, 0])[0].float().log_softmax(-1)


def image_support(config: Any) -> ImageSupport:
    """Measure a model's processing of images, once on this machine."""

    def measured() -> dict[str, Any]:
        try:
            with quietly(), torch.enable_grad():
                twin = Twin(config, device=proof_device())
                plan, _ = best_plan(twin)
                finding, mutual = image_finding(twin, plan)
        except Refusal as refusal:
            return asdict(ImageSupport(str(refusal)))
        except FAILURES as error:
            return asdict(ImageSupport(f"a tiny model of its structure cannot be loaded: {first_line(error)}"))
        if finding.holds:
            return asdict(ImageSupport("", mutual))
        return asdict(ImageSupport(finding.note or f"log-probs of rows with images differ by {finding.value:.1g}"))

    return ImageSupport(**remembered(config, "images", measured))
