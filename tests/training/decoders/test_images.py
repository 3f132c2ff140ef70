"""Images in the forward pass: packed rows equal transformers' rows alone, the engine's log-probs the trainer's."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from braidrl.algorithms.ragged import Ragged
from braidrl.config import ImagesConfig
from braidrl.data.rows import Objects, Rows
from braidrl.data.vision import ImageSpan, Vision, moved
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.training.compute.packed import pack
from braidrl.training.decoders.body import PACKED
from braidrl.training.decoders.head import predicted_log_probs
from braidrl.training.decoders.image_proof import image_finding
from braidrl.training.decoders.images import ModelImages, images_of
from braidrl.training.decoders.proof import Twin
from braidrl.training.loading import load_decoder
from braidrl.training.pretrained import load_tokenizer
from braidrl.training.processors import load_vision
from tests.tiny import ROOT, load_module

shapes = load_module(ROOT / "examples" / "vision" / "shapes.py")
CPU = torch.device("cpu")
SIZES = ((84, 84), (84, 56), (28, 112))
"""Widths and heights of the images."""
ROWS = ((0,), (1, 2), (), (2,), (1, 1, 0), ())
"""The images of each row, by number."""


class Seeing:
    """A tiny model of a family, its images, and rows of unequal lengths with some of them."""

    def __init__(self, folder: Path, family: str, dtype: torch.dtype, head: int = 16) -> None:
        self.path = shapes.write_model(folder / "model", 0, family=family, head=head)
        vision = load_vision(self.path, ImagesConfig(folder=folder / "store"))
        assert vision is not None
        self.vision: Vision = vision
        self.names = [vision.store.add(noise(*size, seed), folder) for seed, size in enumerate(SIZES)]
        self.model = load_decoder(self.path, dtype).requires_grad_(False).eval()
        self.images: ModelImages = images_of(self.model, vision, 64, False)
        generator = torch.Generator().manual_seed(0)
        self.prompts: list[tuple[Tensor, list[ImageSpan]]] = []
        for numbers in ROWS:
            ids = torch.randint(7, 20, (9,), generator=generator).tolist()
            text = [*ids[:4], *(token for _ in numbers for token in (3, vision.token, 5)), *ids[4:]]
            expanded, spans = vision.expand(text, [self.names[number] for number in numbers])
            self.prompts.append((torch.tensor(expanded), spans))

    def rows(self, responses: list[Tensor]) -> Rows:
        """Return the rows of these responses to the prompts, in pairs of one group each."""
        tokens = [torch.cat([ids, said]) for (ids, _), said in zip(self.prompts, responses, strict=True)]
        masks = [torch.arange(len(row)) >= len(ids) for (ids, _), row in zip(self.prompts, tokens, strict=True)]
        joined = Ragged.from_rows(tokens, torch.int64)
        return Rows(
            {
                "source": torch.zeros(len(tokens), dtype=torch.int64),
                "group": torch.arange(len(tokens)),
                "sample": torch.zeros(len(tokens), dtype=torch.int64),
                "tokens": joined,
                "action_mask": Ragged.from_rows(masks, torch.bool),
                "sequence_lengths": Ragged.from_lengths(joined.lengths, torch.ones_like(joined.lengths)),
                "images": Objects(tuple([list(span) for span in spans] for _, spans in self.prompts)),
            }
        )

    def log_probs(self, rows: Rows, share: bool = False) -> Tensor:
        packed = pack(rows, CPU, share, place_images=self.images.place)
        run = self.images.run_packed if packed.model_inputs else None
        assert run is not None
        return predicted_log_probs(self.model, run(packed)[0][packed.predictors], packed.targets)[0]

    def alone(self, tokens: Tensor, spans: list[ImageSpan]) -> Tensor:
        """Return transformers' own log-probs (T - 1,) of one row's tokens."""
        whole: Any = AutoModelForImageTextToText.from_pretrained(
            self.path, dtype=self.model.dtype, attn_implementation="sdpa"
        )
        pixels = [self.vision.pixels(span.name) for span in spans]
        inputs = {key: torch.cat([each[key] for each in pixels]) for key in (pixels[0] if pixels else ())}
        inputs = {key: each.to(self.model.dtype) if each.is_floating_point() else each for key, each in inputs.items()}
        types = torch.zeros_like(tokens)
        for span in spans:
            types[span.start : span.start + span.tokens] = 1
        with torch.no_grad():
            logits = whole(
                input_ids=tokens[None], mm_token_type_ids=types[None].int(), use_cache=False, **inputs
            ).logits
        return logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


def noise(width: int, height: int, seed: int) -> bytes:
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(content, "PNG")
    return content.getvalue()


FAMILIES = [pytest.param(name, marks=[pytest.mark.soak] * (name == "qwen2_vl")) for name in shapes.FAMILIES]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_with_images_equal_transformers_rows_alone(family: str, tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, family, torch.float64)
    # Sampled tokens may have the id of an image's tokens: they are text.
    responses = [torch.tensor([9, seeing.vision.token, 10 + n]) for n in range(len(ROWS))]
    rows = seeing.rows(responses)
    result = seeing.log_probs(rows)
    expected = [seeing.alone(rows["tokens"][n], spans)[-3:] for n, (_, spans) in enumerate(seeing.prompts) if not spans]
    assert torch.allclose(result.view(-1, 3)[[2, 5]], torch.stack(expected), atol=1e-9, rtol=0)
    plain = seeing.rows([torch.tensor([9, 10, 10 + n]) for n in range(len(ROWS))])
    result = seeing.log_probs(plain)
    expected = [seeing.alone(plain["tokens"][n], spans)[-3:] for n, (_, spans) in enumerate(seeing.prompts)]
    assert torch.allclose(result, torch.cat(expected), atol=1e-9, rtol=0)
    assert seeing.images.encoded_count == len(SIZES), "each image is encoded once"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_engine_log_probs_equal_the_trainers_and_do_not_depend_on_other_rows(family: str, tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, family, torch.float32)
    engine = EmbeddedEngine(seeing.model, load_tokenizer(seeing.path), Decoding(16, 256), images=seeing.images)
    assert (engine._native is not None) == (family != "qwen3_5"), "text parts of Qwen-VL decode by compiled kernels"
    requests = [
        Request((0, n, 0), ids, SamplingParams(max_tokens=6, ends=False), images=tuple(spans))
        for n, (ids, spans) in enumerate(seeing.prompts)
    ]
    together = engine.generate(requests)
    rows = seeing.rows([response.tokens for response in together])
    drawn = torch.cat([response.log_probs for response in together])
    assert torch.allclose(seeing.log_probs(rows), drawn, atol=1e-5)
    alone: list[Response] = [engine.generate([request])[0] for request in requests]
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.log_probs, other.log_probs)


def test_prompts_with_equal_tokens_and_other_images_are_computed_apart(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, "qwen3_vl", torch.float32)
    engine = EmbeddedEngine(seeing.model, load_tokenizer(seeing.path), Decoding(16, 256), images=seeing.images)
    other = seeing.vision.store.add(noise(*SIZES[0], 7), tmp_path)
    ids, spans = seeing.prompts[0]
    changed = tuple(span._replace(name=other) for span in spans)
    sampling = SamplingParams(max_tokens=4, ends=False)
    first, second = engine.generate(
        [Request((0, 0, 0), ids, sampling, images=tuple(spans)), Request((0, 1, 0), ids, sampling, images=changed)]
    )
    assert not torch.equal(first.log_probs[:1], second.log_probs[:1])


def test_a_shared_prompt_with_images_gives_the_log_probs_of_rows_alone(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, "qwen3_vl", torch.float64)
    seeing.prompts = [seeing.prompts[1]] * 3 + [seeing.prompts[4]] * 2
    rows = seeing.rows([torch.tensor([9 + n, 10, 11]) for n in range(5)])
    rows = rows.with_columns({"group": torch.tensor([0, 0, 0, 1, 1]), "sample": torch.tensor([0, 1, 2, 0, 1])})
    packed = pack(rows, CPU, True, place_images=seeing.images.place)
    assert len(packed.input_ids) < len(rows["tokens"].values) / 2
    assert torch.allclose(seeing.log_probs(rows, share=True), seeing.log_probs(rows), atol=1e-9, rtol=0)
    # Prompts of equal tokens with other images are no family.
    spans = [[list(span) for span in moved(one, 0)] for one in rows["images"].values]
    spans[0][0][0] = seeing.names[0]
    altered = rows.with_columns({"images": Objects(tuple(spans))})
    assert len(pack(altered, CPU, True).input_ids) > len(pack(rows, CPU, True).input_ids)


def test_images_that_touch_have_the_positions_of_images_apart_without_the_token_between(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, "qwen3_vl", torch.float32)
    ids, spans = seeing.prompts[4]
    positions = seeing.images.placed(ids, [len(ids)], spans).positions
    between = spans[1].start - 1
    joined = torch.cat([ids[: between - 1], ids[between + 1 :]])
    touching = [spans[0], *moved(spans[1:], -2)]
    assert touching[0].start + touching[0].tokens == touching[1].start
    result = seeing.images.placed(joined, [len(joined)], touching).positions
    assert torch.equal(result[: between - 1], positions[: between - 1])
    assert torch.equal(result[between - 1 :], positions[between + 1 :] - 2)


def test_kept_images_stay_within_their_bytes(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, "qwen3_vl", torch.float32)
    seeing.images.kept_bytes = 4000
    for _ in range(3):
        seeing.images.encoded(seeing.names)
        assert seeing.images._cached_bytes <= 10_000
    assert seeing.images.encoded_count > len(SIZES)


def test_a_trained_tower_gets_gradients_and_a_frozen_one_none(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, "qwen3_vl", torch.float32)
    rows = seeing.rows([torch.tensor([9, 10, 11])] * len(ROWS))
    seeing.model.requires_grad_(True)
    for trained in (False, True):
        seeing.images.tower_changes = trained
        seeing.images.clear()
        seeing.model.zero_grad()
        seeing.log_probs(rows).sum().backward()
        gradient = seeing.model.model.visual.patch_embed.proj.weight.grad
        assert (gradient is not None and bool(gradient.abs().sum() > 0)) is trained


def test_the_proof_finds_images_whose_tokens_see_each_other() -> None:
    finding, mutual = image_finding(Twin(AutoConfig.for_model("gemma3")), PACKED)
    assert finding.holds and mutual
