"""Images: files by the hash of their content, and the forms of images in data sets.

path, bytes, {bytes, path}, data: URI, address ──content_of──▶ bytes ──ImageStore.add──▶ name
    ──ImageStore.open──▶ an RGB image

Messages and rows carry names; the store is a folder that all processes of a run read. An image with a path is not
copied: the store has a link to it.
"""

import base64
import hashlib
import io
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from braidrl.errors import UserError, first_line, no_room, shown

if TYPE_CHECKING:
    from braidrl.config import ImagesConfig

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are decoded; Pillow has more, and some of them start programs."""
FILE_BYTES = 64 << 20
"""Maximum size of an image's file."""
WEB = ("http", "https")
FETCH_S, PIECE_BYTES = 60.0, 1 << 16
"""Seconds that an address may take, and bytes read at a time."""
ADDRESSES = "addresses"
"""Folder of the store with a link to the image of each address."""
KNOWN = 4096
"""Images of which a process remembers size, tokens and grid."""
NAME_LENGTH, BASE64 = 100, re.compile(r"[A-Za-z0-9+/\s]++=*+\s*+")
"""A text longer than this, of these characters alone, is no path but an image in base64."""
FORMS = ("image", "image_url", "bytes", "url", "path")
"""Keys of an object that is an image, in the order of preference; `base64` is read too."""
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys of message parts by which other libraries resize a single image."""


class BrokenImage(ValueError):
    """The reason why an image cannot be used, in one line."""


class NotFetched(BrokenImage):
    """An image is an address, and addresses are not fetched."""


@dataclass(frozen=True)
class ImageStore:
    """A folder of images, each under the hash of its content."""

    folder: Path
    most_pixels: int
    """An image with more pixels is refused before it is decoded."""
    fetches: bool = False
    """Whether images at addresses are fetched."""

    @staticmethod
    def of(images: "ImagesConfig") -> "ImageStore":
        return ImageStore(images.folder.expanduser(), images.most_pixels, images.fetch)

    def path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def add(self, image: Any, beside: Path) -> str:
        """Store an image, in any form that `content_of` reads, and return its name.

        Raises BrokenImage for one that cannot be decoded, and UserError if the store cannot be written.
        """
        return self._keep(*content_of(image, beside, self.fetched if self.fetches else None))

    def _keep(self, content: bytes, file: Path | None) -> str:
        name = hashed(content)
        decoded(content, self.most_pixels)
        path = self.path(name)
        if not path.is_file():
            self._write(path, content if file is None else file)
        return name

    def _write(self, path: Path, content: bytes | Path) -> None:
        """Write a file, or a link to one, atomically: other processes may write the same."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                unfinished = Path(folder) / path.name
                if isinstance(content, Path):
                    unfinished.symlink_to(content)
                else:
                    unfinished.write_bytes(content)
                unfinished.rename(path)
        except OSError as error:
            fault = no_room(error) or first_line(error)
            raise UserError(f"data.images.folder: {self.folder} cannot be written: {fault}; name another") from error

    def fetched(self, address: str) -> bytes:
        """Return the bytes of the image at an address, which is fetched once for all runs with this folder.

        Raises BrokenImage if it cannot be fetched or decoded.
        """
        link = self.folder / ADDRESSES / hashed(address.encode())
        if not link.is_file():
            name = self._keep(fetch(address), None)
            self._write(link, self.path(name).absolute())
        return link.read_bytes()

    def content(self, name: str) -> bytes:
        """Return the bytes of an image's file. Raises UserError if it is missing or was changed."""
        path = self.path(name)
        try:
            content = path.read_bytes()
        except OSError:
            source = f", a link to {os.readlink(path)}," if path.is_symlink() else ""
            raise UserError(
                f"the image {path}{source} cannot be read; name a folder that all machines of the run see as "
                "data.images.folder, and read the data again"
            ) from None
        if hashed(content) != name:
            raise UserError(f"the image {path.resolve()} was changed after the data were read; start the run again")
        return content

    def open(self, name: str) -> Any:
        """Return an image as RGB, in the orientation that its camera recorded."""
        try:
            return decoded(self.content(name), self.most_pixels)
        except BrokenImage as error:
            raise UserError(f"the image {self.path(name)}: {error}") from None

    def size(self, name: str) -> tuple[int, int]:
        """Return height and width in pixels."""
        return _size(self, name)


@lru_cache(maxsize=KNOWN)
def _size(store: ImageStore, name: str) -> tuple[int, int]:
    width, height = store.open(name).size
    return height, width


def hashed(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def fetch(address: str) -> bytes:
    """Return what a server has at an address. Raises BrokenImage if it answers with an error, too much, or too late."""
    end, content = time.monotonic() + FETCH_S, bytearray()
    try:
        asked = Request(address, headers={"User-Agent": "braid"})
        with urlopen(asked, timeout=FETCH_S) as answer:
            if urlsplit(answer.geturl()).scheme not in WEB:
                raise ValueError(f"it redirects to {shown(answer.geturl())}")
            while piece := answer.read1(PIECE_BYTES):
                content += piece
                if len(content) > FILE_BYTES or time.monotonic() > end:
                    raise ValueError(f"it has more than {FILE_BYTES} bytes, or takes more than {FETCH_S:g} s")
    except (OSError, HTTPException, ValueError) as error:
        raise BrokenImage(f"the image at {shown(address)} cannot be fetched: {first_line(error)}") from None
    return _checked(bytes(content))


def content_of(image: Any, beside: Path, fetched: Callable[[str], bytes] | None = None) -> tuple[bytes, Path | None]:
    """Return an image's bytes, and its file if the image is a path; relative paths start at `beside`.

    Forms: bytes, a path, a file: or data: URI, {bytes, path} of `datasets`, {url}, {base64}, an image of Pillow, and an
    address if there is `fetched`, which returns its bytes. Raises BrokenImage for anything else.
    """
    if isinstance(image, Mapping):
        inner = next((image[key] for key in FORMS if image.get(key) is not None), None)
        if inner is None and isinstance(encoded := image.get("base64"), str):
            return _checked(from_base64(encoded)), None
        if inner is None:
            raise BrokenImage(f"an image is {shown(dict(image))}, without `bytes`, `path`, `url` or `base64`")
        return content_of(inner, beside, fetched)
    if isinstance(image, bytes | bytearray | memoryview):
        return _checked(bytes(image)), None
    if hasattr(image, "convert") and hasattr(image, "save"):
        written = io.BytesIO()
        as_rgb(image).save(written, "PNG")
        return written.getvalue(), None
    if not isinstance(image, str | Path):
        raise BrokenImage(f"an image is {shown(image)}; give a path, bytes or a data: URI")
    text = str(image)
    if text.startswith("data:"):
        return _checked(from_base64(text.partition(",")[2])), None
    scheme = urlsplit(text).scheme
    if scheme in WEB and fetched is not None:
        return fetched(text), None
    if scheme in (*WEB, "ftp", "s3", "gs"):
        reason = f"an image is the address {shown(text)}, which is not fetched; download it and give its path"
        raise NotFetched(reason) if scheme in WEB else BrokenImage(reason)
    path = Path(unquote(urlsplit(text).path) if scheme == "file" else text).expanduser()
    path = (path if path.is_absolute() else beside / path).absolute()
    try:
        if path.exists() and not path.is_file():
            raise BrokenImage(f"the image {path} is no file")
        if path.stat().st_size > FILE_BYTES:
            raise BrokenImage(f"the image {path} has {path.stat().st_size} bytes, and at most {FILE_BYTES} are read")
        return _checked(path.read_bytes()), path
    except (OSError, ValueError) as error:
        if isinstance(error, BrokenImage):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        is_encoded = len(text) > NAME_LENGTH and BASE64.fullmatch(text)
        remedy = "; write an image in base64 as `data:image/png;base64,...`" if is_encoded else ""
        raise BrokenImage(f"the image {shown(str(path))} cannot be read: {reason}{remedy}") from None


def from_base64(text: str) -> bytes:
    """Decode base64, in lines or not. Raises BrokenImage for another text."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise BrokenImage(f"an image's text is no base64 ({error})") from None


def _checked(content: bytes) -> bytes:
    if not content:
        raise BrokenImage("an image has no bytes")
    if len(content) > FILE_BYTES:
        raise BrokenImage(f"an image has {len(content)} bytes, and at most {FILE_BYTES} are read")
    return content


def decoded(content: bytes, most_pixels: int) -> Any:
    """Decode an image as RGB. Raises BrokenImage for one that is damaged, too large, or a video."""
    # Imported here: runs on text need no Pillow.
    from PIL import Image, ImageOps, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image: Image.Image = Image.open(io.BytesIO(content), formats=FORMATS)
            width, height = image.size
            # Before decoding: the header already has the image's size.
            if width * height > most_pixels:
                raise BrokenImage(
                    f"an image has {width} x {height} pixels, and data.images.most_pixels is {most_pixels}"
                )
            if (frames := getattr(image, "n_frames", 1)) > 1:
                raise BrokenImage(f"an image has {frames} frames, and videos are not supported; give one frame")
            return as_rgb(ImageOps.exif_transpose(image))
        except BrokenImage:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise BrokenImage(
                f"an image has more than the {Image.MAX_IMAGE_PIXELS} pixels that Pillow decodes, and "
                f"data.images.most_pixels is {most_pixels}"
            ) from None
        except Exception as error:  # of any kind: the bytes are untrusted
            # Pillow's own text about unknown bytes differs from object to object, and reasons are counted.
            is_unknown = isinstance(error, UnidentifiedImageError)
            fault = "a file is no image" if is_unknown else f"an image cannot be decoded ({first_line(error)})"
            raise BrokenImage(f"{fault}; give one of {', '.join(FORMATS)}") from None


def as_rgb(image: Any) -> Any:
    """Return an image of Pillow as RGB: transparent pixels become white, and 16 bits become 8.

    Raises BrokenImage for numbers whose range is not known.
    """
    from PIL import Image

    # Pillow would clip values above 255.
    if image.mode.startswith("I;16"):
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    elif image.mode in ("I", "F"):
        raise BrokenImage(f"an image has pixels of mode {image.mode}, without a range; give 8 or 16 bits a channel")
    # A palette's or an alpha channel's own color would show otherwise.
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


IMAGE, MARK = "image", "<image>"
"""The type of a message's part that is an image, and its mark in text."""
INDEX = "index"
"""The key of a part that is the record's image of that number."""
OTHER_MEDIA = ("video", "videos", "audio", "audios")
"""Fields and types of parts that are refused."""


def image_part(name: str | None = None) -> dict[str, Any]:
    """Return the message part of an image; without a name it stands for the record's next image."""
    return {"type": IMAGE} if name is None else {"type": IMAGE, IMAGE: name}


def image_parts(messages: Any) -> list[dict[str, Any]]:
    """Return the parts of messages that are images, in order; text has none."""
    if not isinstance(messages, list):
        return []
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part for part in parts if isinstance(part, dict) and part.get("type") == IMAGE]


def has_marks(messages: Any) -> bool:
    """Return True if text of another role than the assistant has marks of images."""
    if isinstance(messages, str):
        return MARK in messages
    others = [m for m in messages or () if isinstance(m, Mapping) and m.get("role") != "assistant"]
    return any(isinstance(m.get("content"), str) and MARK in m["content"] for m in others)


def names_in(messages: Any) -> list[str]:
    """Return the names of the images in messages, in order."""
    return [part[IMAGE] for part in image_parts(messages) if IMAGE in part]


def kept_messages(value: Any, images: ImageStore, beside: Path) -> Any:
    """Return messages whose images are in the store, each part {type: image, image: name}; other values unchanged.

    Raises BrokenImage for a broken one, a video or a sound.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(message, Mapping) for message in value):
        return value
    messages = []
    for message in value:
        content = message.get("content")
        if isinstance(content, list | tuple):
            message = {**message, "content": [_kept_part(part, images, beside) for part in content]}
        messages.append(message)
    return messages


def _kept_part(part: Any, images: ImageStore, beside: Path) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in (*OTHER_MEDIA, "input_audio", "audio_url", "video_url"):
        raise BrokenImage(f"a message has a part of type {kind}, and videos and sounds are not supported; remove it")
    if kind not in (IMAGE, "image_url"):
        if isinstance(part, Mapping) and (key := next((key for key in (IMAGE, "image_url") if part.get(key)), None)):
            raise BrokenImage(f"a message has a part of type {kind} with {key!r}; write a part of type image for it")
        return part
    given = {key: value for key, value in part.items() if key not in ("type", "text", INDEX) and value is not None}
    if sizes := [key for key in SIZES if key in given]:
        raise BrokenImage(
            f"a part of a message has {sizes[0]!r}, which is not read: data.images.min_pixels and "
            "data.images.max_pixels hold for all images; remove it"
        )
    if given:
        return image_part(images.add(given, beside))
    return image_part() if part.get(INDEX) is None else {**image_part(), INDEX: part[INDEX]}


def with_images(messages: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return messages with a record's images at their marks: `<image>` in text, or parts without a name.

    Without any mark they precede the first user's text. Raises BrokenImage for another number of marks.
    """
    split_messages = [{**message, "content": _split(message.get("content"))} for message in messages]
    marks = [part for part in image_parts(split_messages) if IMAGE not in part]
    first = next((message for message in split_messages if message.get("role") == "user"), None)
    if names and not marks and first is not None:
        marks = [image_part() for _ in names]
        content = first["content"]
        first["content"] = [*marks, *(content if isinstance(content, list) else [{"type": "text", "text": content}])]
    if len(marks) != len(names):
        raise BrokenImage(f"the messages have {len(marks)} marks of images, and the record has {len(names)} images")
    for number, (part, name) in enumerate(zip(marks, names, strict=True)):
        if (index := part.pop(INDEX, number)) != number:
            raise BrokenImage(f"image {number} of the messages has the index {index}; list images in their order there")
        part[IMAGE] = name
    for message, original in zip(split_messages, messages, strict=True):
        if "content" not in original:
            del message["content"]
    return split_messages


def _split(content: Any) -> Any:
    """Return content as separate parts, and text with marks as parts."""
    if isinstance(content, list):
        return [dict(part) for part in content]
    if not isinstance(content, str) or MARK not in content:
        return content
    first, *others = content.split(MARK)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}] if first else []
    for text in others:
        parts += [image_part(), *([{"type": "text", "text": text}] if text else [])]
    return parts
