"""Images in data: every form that data sets have, marks in text and parts of messages, and broken ones."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from PIL import Image
from rich.console import Console

from braidrl.cli.show_data import show_data
from braidrl.config import DataConfig, ImagesConfig, SourceConfig, parse_config
from braidrl.data.images import BrokenImage, ImageStore, names_in, with_images
from braidrl.data.loader import PromptLoader, as_rows
from braidrl.data.prompts import LoadedSource, load_train
from braidrl.data.sources import Reading
from braidrl.data.vision import Vision, moved
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.training.pretrained import load_tokenizer
from braidrl.training.processors import load_vision
from tests.tiny import ROOT, braid, load_module, settings, write_jsonl

shapes = load_module(ROOT / "examples" / "vision" / "shapes.py")
RED = shapes.draw({0: ("square", "red")})
BLUE = shapes.draw({4: ("circle", "blue")})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = shapes.write_model(tmp_path_factory.mktemp("seeing") / "model", 0)
    return folder


@pytest.fixture
def vision(model: Path, tmp_path: Path) -> Vision:
    result = load_vision(model, ImagesConfig(folder=tmp_path / "store"))
    assert result is not None
    return result


def names(path: Path, vision: Vision, **settings: Any) -> list[list[str]]:
    reading = Reading(SourceConfig(path=path, **settings), vision=vision)
    return [names_in(example.prompt) for example in reading]


def loaded(path: Path, model: Path, vision: Vision, **settings: Any) -> LoadedSource:
    data = DataConfig(train=[SourceConfig(path=path)])
    (source,) = load_train(data, load_tokenizer(model), vision=vision, **settings)
    return source


def as_uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def test_an_image_has_one_name_in_every_form_that_data_sets_have(tmp_path: Path, vision: Vision) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    path, uri = str(tmp_path / "red.png"), as_uri(RED)
    said = {"type": "text", "text": "where ?"}
    records = [
        {"prompt": "<image>where ?", "images": ["red.png"]},
        {"prompt": "<image>where ?", "image": path},
        {"prompt": "<image>where ?", "images": [{"path": path, "bytes": None}]},
        {"prompt": "where ?", "images": [uri]},
        {"prompt": "where ?", "images": ["data:image/png;base64," + base64.encodebytes(RED).decode()]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "base64": uri.partition(",")[2]}, said]}]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": uri}, said]}]},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}, said]}]},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, said]}], "images": [f"file://{path}"]},
    ]
    result = names(write_jsonl(tmp_path / "forms.jsonl", records), vision)
    assert {tuple(each) for each in result} == {(ImageStore.of(ImagesConfig(folder=tmp_path)).add(RED, tmp_path),)}


PARTS = {
    "type text": {"type": "text", "text": "?", "image": as_uri(RED)},
    "max_pixels": {"type": "image", "image": as_uri(RED), "max_pixels": 784},
    "source": {"type": "image", "source": {"type": "base64", "data": "iVBO"}},
    "index 1": {"type": "image", "index": 1, "text": None},
}


@pytest.mark.parametrize("key", PARTS)
def test_what_a_part_of_a_message_has_is_read_or_named(key: str, tmp_path: Path, vision: Vision) -> None:
    records = [{"prompt": [{"role": "user", "content": [PARTS[key], {"type": "text", "text": "?"}]}]}]
    records[0] |= {"images": [as_uri(BLUE)]} if key in ("source", "index 1") else {}
    with pytest.raises(UserError, match=key):
        names(write_jsonl(tmp_path / "parts.jsonl", records), vision)


def test_a_field_image_beside_the_images_is_named_as_unread(tmp_path: Path, vision: Vision) -> None:
    both = {"prompt": "<image>?", "images": [as_uri(RED)], "image": as_uri(BLUE)}
    one = {"prompt": "<image>?", "image": as_uri(BLUE)}
    for record, unread in ((both, {"image": 1}), (one, {})):
        reading = Reading(SourceConfig(path=write_jsonl(tmp_path / "both.jsonl", [record])), vision=vision)
        assert len(list(reading)) == 1 and reading.unread == unread


def test_parquet_with_undecoded_images_of_datasets_is_read_as_bytes(tmp_path: Path, vision: Vision) -> None:
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    rows = {"prompt": ["<image>where ?", "no image"], "images": [[{"bytes": RED, "path": None}], []]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "shapes.parquet")
    first, second = names(tmp_path / "shapes.parquet", vision)
    assert vision.store.content(first[0]) == RED and second == []


def test_a_folder_of_save_to_disk_is_read_with_its_images(tmp_path: Path, vision: Vision) -> None:
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    rows = {"prompt": ["<image>where ?", "no image"], "image": [{"bytes": RED, "path": None}, None]}
    saved = datasets.Dataset.from_dict(rows, features=features)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "other": saved.select([1])}).save_to_disk(tmp_path / "two")
    first, second = names(tmp_path / "one", vision)
    assert vision.store.content(first[0]) == RED and second == []
    assert names(tmp_path / "two", vision) == [first, []]
    assert names(tmp_path / "two", vision, split="other") == [[]]
    with pytest.raises(UserError, match=r"no split 'oter'.*other"):
        names(tmp_path / "two", vision, split="oter")


class Site(BaseHTTPRequestHandler):
    """Serves a red square, an error, and a redirection to a file."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == "/there":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
            return
        self.send_response(200 if self.path == "/red.png" else 404)
        self.end_headers()
        self.wfile.write(RED)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Site.asked.clear()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_address_is_fetched_once_and_only_if_asked(tmp_path: Path, vision: Vision, site: str) -> None:
    part = {"type": "image_url", "image_url": {"url": f"{site}/red.png"}}
    records = [
        {"prompt": "<image>where ?", "images": [f"{site}/red.png"]},
        {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "where ?"}]}]},
    ]
    path = write_jsonl(tmp_path / "addresses.jsonl", records)
    with pytest.raises(UserError, match=r"is not fetched.* or write data\.images\.fetch=true"):
        names(path, vision)
    # The store of environments, to which the setting does not apply.
    with pytest.raises(BrokenImage, match=r"is not fetched; download it and give its path$"):
        vision.store.add(f"{site}/red.png", tmp_path)
    assert not Site.asked
    fetching = replace(vision, store=replace(vision.store, fetches=True))
    for _ in range(2):
        (first,), (second,) = names(path, fetching)
    assert first == second and vision.store.content(first) == RED and Site.asked == ["/red.png"]


@pytest.mark.parametrize(("path", "fault"), [("/none.png", "404"), ("/there", "Redirection")])
def test_an_address_that_cannot_be_fetched_is_a_broken_image(path: str, fault: str, vision: Vision, site: str) -> None:
    store = replace(vision.store, fetches=True)
    with pytest.raises(BrokenImage, match=f"cannot be fetched: .*{fault}"):
        store.add(site + path, Path.cwd())


def test_marks_stand_where_written_and_before_the_first_user_text_without_any() -> None:
    asked = [{"role": "system", "content": "look"}, {"role": "user", "content": "a <image> b <image>"}]
    _, user = with_images(asked, ["x", "y"])
    assert [part.get("text", part.get("image")) for part in user["content"]] == ["a ", "x", " b ", "y"]
    _, user = with_images([{"role": "system", "content": "look"}, {"role": "user", "content": "hi"}], ["x"])
    assert [part.get("text", part.get("image")) for part in user["content"]] == ["x", "hi"]


def test_rows_of_a_group_refer_to_one_image_and_their_spans_cover_its_tokens(
    tmp_path: Path, model: Path, vision: Vision
) -> None:
    records = [{"prompt": "<image>where <image>?", "images": [as_uri(RED), as_uri(BLUE)], "response": "red"}]
    source = loaded(write_jsonl(tmp_path / "two.jsonl", records), model, vision, responses=True)
    rows = as_rows(PromptLoader([source]).peek([0]), 64)
    spans = rows["images"]
    assert len(rows) == 64 and len({json.dumps(each) for each in spans.values}) == 1
    assert len(list((tmp_path / "store").rglob("*/*"))) == 2
    for _, start, count in spans[0]:
        part = rows["prompt"][0][start : start + count]
        assert count == 9 and set(part.tolist()) == {vision.token}
    unexpanded = vision.collapse(rows["prompt"][0].tolist(), moved(spans[0], 0))
    assert vision.expand(unexpanded, [name for name, _, _ in spans[0]])[0] == rows["prompt"][0].tolist()


def test_conversations_with_images_in_later_turns_train_text_alone(tmp_path: Path, model: Path, vision: Vision) -> None:
    def says(image: bytes) -> list[dict[str, Any]]:
        return [{"type": "image", "image": as_uri(image)}, {"type": "text", "text": "where ?"}]

    messages = [
        {"role": "user", "content": says(RED)},
        {"role": "assistant", "content": "top-left"},
        {"role": "user", "content": says(BLUE)},
        {"role": "assistant", "content": "middle-center"},
    ]
    path = write_jsonl(tmp_path / "turns.jsonl", [{"messages": messages}])
    source = loaded(path, model, vision, responses=True)
    rows = as_rows(PromptLoader([source]).peek([0]), 1)
    tokens = [*rows["prompt"][0].tolist(), *rows["response"][0].tolist()]
    (_, first, _), (_, second, count) = rows["images"][0]
    assert first < len(rows["prompt"][0]) < second and tokens[second : second + count] == [vision.token] * count
    trained = [
        token
        for token, is_trained in zip(tokens[-len(rows["response"][0]) :], rows["response_mask"][0], strict=True)
        if is_trained
    ]
    assert vision.token not in trained and len(trained) == 4


def png_header(width: int, height: int, content: bytes = b"") -> bytes:
    """Return a gray PNG of any stated size, whose compressed content is `content`."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def saved(image: Image.Image, kind: str) -> bytes:
    written = io.BytesIO()
    image.save(written, kind)
    return written.getvalue()


def jpeg(mode: str = "RGB") -> bytes:
    return saved(Image.effect_noise((84, 84), 50).convert(mode), "JPEG")


def animated() -> bytes:
    written, frames = io.BytesIO(), [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(written, "GIF", save_all=True, append_images=frames[1:])
    return written.getvalue()


BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "truncated JPEG": (lambda: as_uri(jpeg()[:-400]), "decoded"),
    "PNG of 100 megapixels": (lambda: as_uri(png_header(10_000, 10_000)), "most_pixels"),
    "decompression bomb": (lambda: as_uri(png_header(1 << 16, 1 << 16, zlib.compress(bytes(1 << 20)))), "most_pixels"),
    "animated GIF": (lambda: as_uri(animated()), "frames"),
    "zero size": (lambda: as_uri(png_header(0, 0)), "PNG"),
    "no bytes": (lambda: as_uri(b""), "bytes"),
    "missing file": (lambda: "nowhere.png", "nowhere.png"),
    "base64 without data:": (lambda: base64.b64encode(saved(Image.new("RGB", (9, 9)), "BMP")).decode(), "as `data:"),
    "a long name of spaces": (lambda: "a" + 10**6 * " " + "!", "cannot be read"),
    "base64 garbage": (lambda: "data:image/png;base64,@@@@", "base64"),
    "PDF": (lambda: as_uri(b"%PDF-1.7\n1 0 obj"), "PNG"),
    "address": (lambda: "https://example.org/a.png", "download"),
    "number": (lambda: 7, "path"),
    "thin line": (lambda: as_uri(png_header(3000, 1, zlib.compress(bytes(3001)))), "ratio"),
    "folder": (lambda: ".", "is no file"),
    "device without end": (lambda: "/dev/zero", "is no file"),
    "null": (lambda: None, "is None"),
    "pixels without a range": (lambda: as_uri(saved(Image.new("F", (84, 84)), "TIFF")), "range"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_one_line_or_a_counted_record(name: str, model: Path, tmp_path: Path) -> None:
    make, key = BROKEN[name]
    records = [{"prompt": "<image>?", "images": [as_uri(RED)]}, {"prompt": "<image>?", "images": [make()]}]
    path = write_jsonl(tmp_path / "broken.jsonl", records)
    vision = load_vision(model, ImagesConfig(folder=tmp_path / "store"))
    assert vision is not None
    with pytest.raises(UserError, match=key) as failed:
        names(path, vision)
    assert "line 2" in str(failed.value) and "\n" not in str(failed.value)
    skipping = load_vision(model, ImagesConfig(folder=tmp_path / "store", broken="skip"))
    reading = Reading(SourceConfig(path=path), vision=skipping)
    assert len(list(reading)) == 1 and reading.left_out == {"an image of it is broken": 1}


@pytest.mark.parametrize("marks", ["", "<image>", "<image><image><image>"])
def test_a_wrong_count_of_marks_names_line_and_both_numbers(marks: str, vision: Vision, tmp_path: Path) -> None:
    images = [as_uri(RED), as_uri(BLUE)] if marks else []
    with pytest.raises(UserError, match=r"line 1.*1 marks.*0 images"):
        names(write_jsonl(tmp_path / "text.jsonl", [{"prompt": "<image>?", "pictures": images}]), vision)
    said = f"{marks}?" if marks else [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    with pytest.raises(UserError, match=r"line 1.*\d marks.*\d images"):
        names(write_jsonl(tmp_path / "marks.jsonl", [{"prompt": said, "images": images}]), vision)


def test_other_kinds_of_pixels_become_rgb_transparent_ones_white_and_16_bits_8(vision: Vision, tmp_path: Path) -> None:
    def pixel(given: Any) -> Any:
        return vision.store.open(vision.store.add(given, tmp_path)).getpixel((5, 5))

    clear, deep = Image.new("RGBA", (84, 84), (255, 0, 0, 0)), Image.new("I;16", (84, 84), 0x8000)
    assert pixel(saved(clear, "PNG")) == pixel(clear) == (255, 255, 255)
    assert pixel(saved(deep, "PNG")) == pixel(saved(deep, "TIFF")) == pixel(deep) == (128, 128, 128)
    assert vision.store.open(vision.store.add(jpeg("CMYK"), tmp_path)).mode == "RGB"


@pytest.mark.soak
def test_commands_leave_out_and_count_every_kind_of_broken_image(model: Path, tmp_path: Path) -> None:
    records = [{"prompt": "<image>?", "images": [make()], "answer": "1"} for make, _ in BROKEN.values()]
    right = [{"prompt": "<image>?", "images": [as_uri(image)], "answer": "1"} for image in (RED, BLUE)] * 8
    data = write_jsonl(tmp_path / "data.jsonl", [*right, *records, right[0] | {"prompt": "<image><image>?"}])
    tree = settings(
        tmp_path,
        model,
        data,
        data={"images": {"folder": str(tmp_path / "store"), "broken": "skip"}},
        reward={"verify": "exact"},
        rollout={"max_response_tokens": 2},
        trackers=[],
    )
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    for command in ("data", "train"):
        with braid(command, tmp_path / "run.yaml", folder=tmp_path) as process:
            output = " ".join("".join(text or "" for text in process.communicate(timeout=120)).split())
        assert process.returncode == 0 and "Traceback" not in output, output[-2000:]
        assert f"{len(BROKEN) + 1} records left out because an image of it is broken" in output, output[-2000:]
    lines = read_metrics(tmp_path / "run")
    assert len(lines) == 2 and lines[-1]["memory/actor.generate/resident_max"] < 1 << 30


def test_an_image_that_changes_after_reading_ends_in_a_line(vision: Vision, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    name = vision.store.add("a.png", tmp_path)
    (tmp_path / "a.png").write_bytes(BLUE)
    with pytest.raises(UserError, match="changed"):
        vision.store.content(name)
    (tmp_path / "a.png").unlink()
    with pytest.raises(UserError, match=r"data\.images\.folder"):
        vision.store.content(name)


@pytest.mark.parametrize("record", [{"prompt": "?", "videos": ["a.mp4"]}, {"prompt": "?", "audio": "a.wav"}])
def test_videos_and_sounds_are_refused_in_a_line(record: dict[str, Any], vision: Vision, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not supported"):
        names(write_jsonl(tmp_path / "media.jsonl", [record]), vision)


@pytest.mark.parametrize("form", ["part", "mark"])
def test_a_model_that_reads_text_refuses_images_in_messages(form: str, tmp_path: Path) -> None:
    part = [{"role": "user", "content": [{"type": "image", "image": as_uri(RED)}, {"type": "text", "text": "?"}]}]
    records = {"part": {"prompt": part}, "mark": {"prompt": "<image>?", "images": [as_uri(RED)]}}
    with pytest.raises(UserError, match="reads text"):
        list(Reading(SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", [records[form]]))))


def test_pixels_follow_the_configured_bounds(model: Path, tmp_path: Path) -> None:
    wide = io.BytesIO()
    Image.new("RGB", (168, 84)).save(wide, "PNG")
    for most, expected in ((None, 10), (28 * 28 * 2, 2)):
        vision = load_vision(model, ImagesConfig(folder=tmp_path, max_pixels=most))
        assert vision is not None
        name = vision.store.add(wide.getvalue(), tmp_path)
        assert len(vision.expansion(name)) == expected == int(vision.grid(name).prod()) // 4


def test_braid_data_draws_each_image_in_a_terminal_with_colors(model: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "shown.jsonl", [{"prompt": "<image>?", "images": [as_uri(RED)], "answer": "1"}])
    images = {"train": str(path), "images": {"folder": str(tmp_path / "store")}}
    made = {"reward": {"verify": "exact"}, "rollout": {"max_response_tokens": 4}}
    config = parse_config({"flow": "grpo", "model": str(model), "data": images, **made})
    colored, plain = io.StringIO(), io.StringIO()
    show_data(config, Console(file=colored, force_terminal=True, color_system="truecolor", width=200))
    show_data(config, Console(file=plain, width=200))
    assert "images a row: 1 in 1 rows" in plain.getvalue() and "image: 84 x 84 pixels, 9 tokens" in plain.getvalue()
    # Each character is two pixels, of 32 in each direction; the square is red.
    assert colored.getvalue().count("▀") == 32 * 16 and "▀" not in plain.getvalue()
    assert "38;2;255;0;0" in colored.getvalue()
