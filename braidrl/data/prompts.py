"""A data file, read and tokenised: what the loader draws from. Prompts that are too long are dropped here, and counted.

file ──read_examples──▶ examples ──PromptTemplate──▶ token ids ──at most max_prompt_tokens──▶ LoadedSource

Several processes that read the same files tokenise a part of each, and tell each other which prompts are short enough.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.config import DataConfig, SourceConfig
from braidrl.data.packing import equal_share
from braidrl.data.sources import Example, place, read_examples
from braidrl.data.templates import PromptTemplate
from braidrl.errors import UserError

T = TypeVar("T")
BATCH = 512
PROGRESS_AFTER_S = 2.0


@dataclass(frozen=True, eq=False)
class LoadedSource:
    """The examples of one file that passed the length filter.

    `kept` (K,) are their places in the file, from 0, of `read` examples. `prompts` and `responses` hold token ids as int32,
    much smaller than lists; where `prompts` is None a text is tokenised when it is drawn.
    """

    path: Path
    weight: float
    examples: list[Example]
    kept: list[int]
    read: int
    template: PromptTemplate
    prompts: Ragged | None
    responses: Ragged | None
    rejected: Ragged | None = None
    longest_prompt: int = 0
    """Tokens; 0 where another process has tokenised the file."""
    longest_row: int = 0
    """Tokens of a prompt with its given response; 0 where none is given."""

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def dropped(self) -> int:
        """Return the number of prompts that were too long."""
        return self.read - len(self.examples)

    def prompt(self, index: int) -> Tensor:
        """Return token ids (T,) int64 of an example's prompt."""
        if self.prompts is not None:
            return self.prompts[index].to(torch.int64)
        return torch.tensor(self.template.encode(self.examples[index].prompt), dtype=torch.int64)

    def response(self, index: int) -> Tensor | None:
        """Return token ids (T,) int64 of an example's given response, or None where responses were not asked for."""
        return self._given(self.examples[index].response, self.responses, index)

    def rejected_response(self, index: int) -> Tensor | None:
        """Return token ids (T,) int64 of the worse response of a pair, or None where pairs were not asked for."""
        return self._given(self.examples[index].rejected, self.rejected, index)

    def _given(self, text: str | None, tokenized: Ragged | None, index: int) -> Tensor | None:
        if text is None:
            return None
        if tokenized is not None:
            return tokenized[index].to(torch.int64)
        return torch.tensor(self.template.encode_responses([text])[0], dtype=torch.int64)

    def report(self) -> str:
        """Say how many prompts were dropped of how many, for the log."""
        return dropped_report(self.path, self.read, len(self))


def dropped_report(path: Path, read: int, kept: int) -> str:
    """Return how many prompts of a file were dropped of how many."""
    return f"{path}: {read} prompts, {read - kept} dropped as longer than data.max_prompt_tokens"


@dataclass(frozen=True)
class Readers:
    """The processes that read the same files, this one among them: each tokenises its own part of every file."""

    rank: int = 0
    size: int = 1
    tell: Callable[[Any], list[Any]] = lambda said: [said]
    """Returns what all of them say, JSON values in the order of ranks."""

    def part(self, count: int) -> range:
        """Return which of so many examples this process tokenises."""
        return equal_share(count, self.rank, self.size)


ALONE = Readers()


def load_train(
    data: DataConfig, tokenizer: Any, *, responses: bool = False, pairs: bool = False,
    kept: Sequence[Sequence[int]] | None = None, readers: Readers = ALONE,
) -> list[LoadedSource]:  # fmt: skip
    """Load every source of `data.train`. Raises UserError when there is none, or for a file that cannot be used.

    `kept` holds another rank's `LoadedSource.kept` of each; `readers` divide the work.
    """
    check_train(data)
    template = PromptTemplate(tokenizer, data.chat_template, data.system_prompt)
    longest, places = data.max_prompt_tokens, kept if kept is not None else [None] * len(data.train)
    return [
        load_source(source, template, longest, responses=responses, pairs=pairs, kept=of_source, readers=readers)
        for source, of_source in zip(data.train, places, strict=True)
    ]


def check_train(data: DataConfig) -> None:
    """Raise UserError where no training data is named."""
    if not data.train:
        raise UserError("data.train is not set; give it a .jsonl or .parquet file, as in data.train=train.jsonl")


def load_eval(
    data: DataConfig, tokenizer: Any, *, pairs: bool = False, kept: Mapping[str, Sequence[int]] | None = None,
    readers: Readers = ALONE,
) -> dict[str, LoadedSource]:  # fmt: skip
    """Load the held-out sets of `data.eval` by name, as `load_train` does. Raises UserError for a file that cannot be used."""
    template = PromptTemplate(tokenizer, data.chat_template, data.system_prompt)
    longest = data.max_prompt_tokens
    return {
        name: load_source(source, template, longest, pairs=pairs, kept=kept[name] if kept else None, readers=readers)
        for name, source in data.eval.items()
    }


def load_texts(
    data: DataConfig, tokenizer: Any, kept: Sequence[int] | None = None, readers: Readers = ALONE
) -> LoadedSource:
    """Load the pre-training texts of `data.ptx`. Raises UserError when there are none, or for a file that cannot be used."""
    if data.ptx is None:
        raise UserError("data.ptx is not set, and the flow trains on pre-training text; write data.ptx=texts.jsonl")
    template = PromptTemplate(tokenizer, chat_template=False)
    return load_source(data.ptx, template, data.max_prompt_tokens, kept=kept, readers=readers)


def load_source(
    source: SourceConfig, template: PromptTemplate, max_prompt_tokens: int, *, responses: bool = False,
    pairs: bool = False, kept: Sequence[int] | None = None, readers: Readers = ALONE,
) -> LoadedSource:  # fmt: skip
    """Read, tokenise and filter one file.

    Args:
        source: The file and its fields.
        template: Turns prompts into token ids.
        max_prompt_tokens: Longer prompts are dropped.
        responses: Read a given response of each example.
        pairs: Read a chosen and a rejected response of each example.
        kept: Another rank's `LoadedSource.kept` of the file, in place of the filter: only prompts that are drawn are tokenised then.
        readers: The processes that call this together. Where they are several, prompts are tokenised again when they are drawn.

    Raises:
        UserError: For a fault in the file, or when no prompt is short enough.
    """
    examples = read_examples(source, responses=responses, pairs=pairs)
    if kept is not None:
        return LoadedSource(
            source.path, source.weight, [examples[i] for i in kept], list(kept), len(examples), template, None, None
        )
    given = [
        [example.response for example in examples] if responses or pairs else None,
        [example.rejected for example in examples] if pairs else None,
    ]
    part, found = TokenizedPart(), {"refused": ""}
    try:
        part = tokenized_part(source.path, examples, given, readers.part(len(examples)), template, max_prompt_tokens)
        found |= part.found()
    except UserError as error:
        found["refused"] = str(error)
    every = readers.tell(found)
    for refused in filter(None, (one["refused"] for one in every)):
        raise UserError(refused)
    places = [place for one in every for place in one["places"]]
    if not places:
        shortest = min(one["shortest"] for one in every if one["shortest"])
        raise UserError(
            f"{source.path}: all {len(examples)} prompts are longer than data.max_prompt_tokens={max_prompt_tokens}; "
            f"the shortest has {shortest} tokens"
        )
    tokens = (part.prompts, *part.given) if readers.size == 1 else (None, None, None)
    return LoadedSource(
        source.path, source.weight, [examples[i] for i in places], places, len(examples), template, *tokens,
        max(one["longest_prompt"] for one in every), max(one["longest_row"] for one in every),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class TokenizedPart:
    """The prompts of a part of a file that are short enough, with their places in it and their given responses."""

    places: Sequence[int] = ()
    prompts: Ragged | None = None
    given: tuple[Ragged | None, Ragged | None] = (None, None)
    shortest: int = 0
    """Tokens of the shortest prompt of the part, kept or not."""

    def found(self) -> dict[str, Any]:
        """Return what other readers of the file have to know."""
        lengths = self.prompts.lengths if self.prompts is not None else torch.zeros(0, dtype=torch.int64)
        rows = [lengths + responses.lengths for responses in self.given if responses is not None]
        return {
            "places": list(self.places), "shortest": self.shortest,
            "longest_prompt": int(lengths.max()) if len(lengths) else 0,
            "longest_row": max((int(row.max()) for row in rows if len(row)), default=0),
        }  # fmt: skip


def tokenized_part(
    path: Path, examples: Sequence[Example], given: Sequence[Sequence[str | None] | None], part: range,
    template: PromptTemplate, max_prompt_tokens: int,
) -> TokenizedPart:  # fmt: skip
    """Tokenise and filter the examples of a part of a file, with the texts that are `given` beside them."""
    prompts, lengths = tokenize(path, examples[part.start : part.stop], template, max_prompt_tokens)
    places = [place for place, length in zip(part, lengths, strict=True) if length <= max_prompt_tokens]
    better, worse = (
        tokenize_responses(path, [text for place in places if (text := texts[place]) is not None], template)
        if texts is not None
        else None
        for texts in given
    )
    return TokenizedPart(places, prompts, (better, worse), min(lengths, default=0))


def tokenize(
    path: Path, examples: Sequence[Example], template: PromptTemplate, max_prompt_tokens: int
) -> tuple[Ragged, list[int]]:
    """Return the int32 token ids of prompts that are short enough, and the length of every prompt.

    Raises UserError with the place of a prompt that the template refuses or that has no tokens.
    """
    lengths: list[int] = []

    def short_ones() -> Iterator[list[list[int]]]:
        for batch in with_progress(in_batches(examples), len(examples), f"Tokenising prompts of {path.name}"):
            ids = template.encode_text([render_at(path, example, template) for example in batch])
            lengths.extend(map(len, ids))
            yield [row for row in ids if len(row) <= max_prompt_tokens]

    tokens = joined(short_ones())
    if 0 in lengths:
        empty = examples[lengths.index(0)]
        raise UserError(f"{place(path, empty.line)}: the tokenizer makes no token of this prompt; write some text")
    return tokens, lengths


def tokenize_responses(path: Path, texts: Sequence[str], template: PromptTemplate) -> Ragged:
    """Return the int32 token ids of given responses, each with its end of sequence."""
    batches = with_progress(in_batches(texts), len(texts), f"Tokenising responses of {path.name}")
    return joined(template.encode_responses(batch) for batch in batches)


def render_at(path: Path, example: Example, template: PromptTemplate) -> str:
    try:
        return template.render(example.prompt)
    except UserError as error:
        raise UserError(f"{place(path, example.line)}: {error}") from None


def joined(batches: Iterable[list[list[int]]]) -> Ragged:
    """Join the token ids of all batches as int32; lists live only as long as their batch."""
    parts = [Ragged.from_rows(batch, torch.int32) for batch in batches]
    return Ragged.cat(parts) if parts else Ragged.from_rows([], torch.int32)


def in_batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def with_progress(
    batches: Iterable[Sequence[T]], total: int, title: str, after_s: float = PROGRESS_AFTER_S
) -> Iterator[Sequence[T]]:
    """Yield the same batches; a bar appears on stderr if they take longer than `after_s` seconds."""
    started = time.monotonic()
    done = 0
    with ExitStack() as stack:
        progress: Progress | None = None
        for batch in batches:
            if progress is None and time.monotonic() - started >= after_s:
                progress = stack.enter_context(Progress(console=Console(stderr=True)))
                task = progress.add_task(title, total=total)
            yield batch
            done += len(batch)
            if progress is not None:
                progress.update(task, completed=done)
