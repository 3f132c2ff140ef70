"""A source that is too large for memory, read once and written to files from which any example is read by itself.

examples, token ids ──IndexWriter──▶ examples, prompts, responses, rejected: values and where each row ends ──pread──▶ one row

Rows are read and not mapped, so that what a process holds does not grow with what it has drawn.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from braidrl.config import SourceConfig
from braidrl.data.sources import Example
from braidrl.data.templates import PromptTemplate

TOKENS = ("prompts", "responses", "rejected")
FORM = 1
"""Changes with the files' layout, so that an index of another is not read."""


@dataclass(frozen=True)
class IndexFacts:
    """What would need a pass over all of a source's examples."""

    read: int
    """Examples, those included that are too long."""
    left_out: dict[str, int]
    """Records that are no examples, by reason."""
    longest_prompt: int
    longest_row: int
    """Tokens of the longest prompt, and of the longest prompt with a given response, 0 where none is given."""
    unanswered: list[Any] | None
    """The first example without an answer."""


class FlatWriter:
    """Appends rows to a file of values and one of where each ends."""

    def __init__(self, folder: Path, name: str) -> None:
        self.values, self.ends = (folder / f"{name}.values").open("wb"), (folder / f"{name}.ends").open("wb")
        self.end = 0
        self.ends.write(np.int64(0).tobytes())

    def extend(self, rows: Sequence[bytes]) -> None:
        """Append rows, each the bytes of its values."""
        ends = self.end + np.cumsum([len(row) for row in rows], dtype=np.int64)
        self.values.write(b"".join(rows))
        self.ends.write(ends.tobytes())
        self.end = int(ends[-1]) if len(ends) else self.end

    def close(self) -> None:
        """Write what is left."""
        self.values.close()
        self.ends.close()


class FlatReader:
    """The rows that a FlatWriter wrote, each read when it is asked for."""

    def __init__(self, folder: Path, name: str) -> None:
        self.ends_path = folder / f"{name}.ends"
        self.values = os.open(folder / f"{name}.values", os.O_RDONLY)
        self.ends = os.open(self.ends_path, os.O_RDONLY)
        self.rows = os.fstat(self.ends).st_size // 8 - 1

    def __len__(self) -> int:
        return self.rows

    def row(self, index: int) -> bytes:
        """Return the bytes of a row. Raises IndexError beyond the last one."""
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of {self.rows}")
        start, end = np.frombuffer(os.pread(self.ends, 16, 8 * index), np.int64)
        return os.pread(self.values, int(end - start), int(start))

    def __del__(self) -> None:
        for handle in (getattr(self, "values", None), getattr(self, "ends", None)):
            if handle is not None:
                os.close(handle)


class IndexedTokens(FlatReader):
    """Token ids, int32, of each row."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(np.frombuffer(bytearray(self.row(index)), np.int32))

    @cached_property
    def lengths(self) -> Tensor:
        """Return the number of tokens of every row, (K,) int64."""
        return torch.from_numpy(np.diff(np.fromfile(self.ends_path, np.int64)) // 4)


class IndexedExamples(FlatReader, Sequence[Example]):
    """The examples, without their token ids."""

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        return Example(*json.loads(self.row(index)))


class IndexWriter:
    """Writes the examples of a source that are short enough, with their token ids."""

    def __init__(self, folder: Path, max_prompt_tokens: int, given: int) -> None:
        """Write into `folder`; each example has so many given responses: none, one, or the two of a pair."""
        self.folder, self.max_prompt_tokens = folder, max_prompt_tokens
        self.examples = FlatWriter(folder, "examples")
        self.tokens = [FlatWriter(folder, name) for name in TOKENS[: 1 + given]]
        self.read = self.longest_prompt = self.longest_row = self.shortest = 0
        self.unanswered: list[Any] | None = None

    def add(self, examples: Sequence[Example], prompts: Sequence[list[int]], template: PromptTemplate) -> None:
        """Add the next examples; their responses are tokenised here."""
        self.read += len(examples)
        self.shortest = min(self.shortest or len(prompts[0]), *map(len, prompts), len(prompts[0]))
        kept = [(e, ids) for e, ids in zip(examples, prompts, strict=True) if len(ids) <= self.max_prompt_tokens]
        if not kept:
            return
        texts = [[e.response for e, _ in kept], [e.rejected for e, _ in kept]][: len(self.tokens) - 1]
        given = [template.encode_responses([str(text) for text in column]) for column in texts]
        self.examples.extend([json.dumps(astuple(e), separators=(",", ":")).encode() for e, _ in kept])
        for writer, rows in zip(self.tokens, [[ids for _, ids in kept], *given], strict=True):
            writer.extend([np.asarray(ids, np.int32).tobytes() for ids in rows])
        self.longest_prompt = max(self.longest_prompt, *(len(ids) for _, ids in kept))
        for column in given:
            lengths = [len(ids) + len(response) for (_, ids), response in zip(kept, column, strict=True)]
            self.longest_row = max(self.longest_row, *lengths)
        if self.unanswered is None:
            self.unanswered = next((list(astuple(e)) for e, _ in kept if e.answer is None), None)

    def finish(self, left_out: dict[str, int]) -> None:
        """Write what is known of the whole."""
        for writer in (self.examples, *self.tokens):
            writer.close()
        facts = IndexFacts(self.read, left_out, self.longest_prompt, self.longest_row, self.unanswered)
        (self.folder / "facts.json").write_text(json.dumps(asdict(facts)))


def read_facts(folder: Path) -> IndexFacts:
    """Return what an index says of its source."""
    return IndexFacts(**json.loads((folder / "facts.json").read_text()))


def index_folder(
    cache: Path, source: SourceConfig, template: PromptTemplate, max_prompt_tokens: int, *further: Any
) -> Path:
    """Return where the index of a source is: another folder for other files, settings, conversion or tokenizer.

    Args:
        cache: Where indexes are kept.
        source: The file or folder, with what is chosen of it.
        template: Turns prompts into token ids.
        max_prompt_tokens: Longer prompts are left out.
        further: Whatever else the index depends on.
    """
    files = sorted(path for path in source.path.rglob("*") if path.is_file()) if source.path.is_dir() else [source.path]
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    code = (source.convert or "").rpartition(":")[0]
    own = Path(code).read_text() if code.endswith(".py") and Path(code).is_file() else ""
    tokenizer = template.tokenizer
    vocabulary = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    described = [
        FORM, stats, source.model_dump(mode="json", exclude={"weight", "verify"}), own, vocabulary, tokenizer.chat_template,
        template.chat_template, template.system_prompt, max_prompt_tokens, further,
    ]  # fmt: skip
    name = hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()
    return cache.expanduser() / f"{source.label}-{name}"


@contextmanager
def whole_index(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill that appears at `folder` when it is whole; where another process was first, its own stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield partial
        if not folder.exists():
            partial.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
