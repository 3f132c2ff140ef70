"""A source, read and tokenised: what the loader draws from. Prompts that are too long are dropped here, and counted.

file ──Reading──▶ examples ──PromptTemplate──▶ token ids ──at most max_prompt_tokens──▶ LoadedSource
                                        larger than memory: ──▶ index, of which each process reads what it draws

Several processes that read the same files tokenise a part of each, and tell each other which prompts are short enough.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.config import DataConfig, SourceConfig
from braidrl.data.indexed import (
    TOKENS,
    IndexedExamples,
    IndexedTokens,
    IndexFacts,
    IndexWriter,
    index_folder,
    read_facts,
    whole_index,
)
from braidrl.data.packing import equal_share
from braidrl.data.records import check_source
from braidrl.data.sources import Example, Reading
from braidrl.data.templates import PromptTemplate
from braidrl.data.tokenizing import BATCH, batched, tokenize, tokenize_batch, tokenize_responses, with_progress
from braidrl.errors import UserError


@dataclass(frozen=True, eq=False)
class LoadedSource:
    """The examples of one source that passed the length filter.

    `kept` (K,) are their places among the `read` examples, from 0, or the folder of the index that they are in. `prompts` and
    `responses` hold token ids as int32, much smaller than lists; where `prompts` is None a text is tokenised when it is drawn.
    """

    path: Path
    weight: float
    examples: Sequence[Example]
    kept: list[int] | str
    read: int
    template: PromptTemplate
    prompts: Ragged | IndexedTokens | None
    responses: Ragged | IndexedTokens | None
    rejected: Ragged | IndexedTokens | None = None
    longest_prompt: int = 0
    """Tokens; 0 where another process has tokenised the file."""
    longest_row: int = 0
    """Tokens of a prompt with its given response; 0 where none is given."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Records that are no examples, by reason."""
    facts: IndexFacts | None = None
    """Of a source that is read from an index."""

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def dropped(self) -> int:
        """Return the number of prompts that were too long."""
        return self.read - len(self.examples)

    @property
    def unanswered(self) -> Example | None:
        """Return the first example without an answer."""
        if self.facts is not None:
            return Example(*self.facts.unanswered) if self.facts.unanswered else None
        return next((example for example in self.examples if example.answer is None), None)

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

    def _given(self, text: str | None, tokenized: Ragged | IndexedTokens | None, index: int) -> Tensor | None:
        if text is None:
            return None
        if tokenized is not None:
            return tokenized[index].to(torch.int64)
        return torch.tensor(self.template.encode_responses([text])[0], dtype=torch.int64)

    def report(self) -> str:
        """Say how many prompts were dropped of how many, and which records were no examples, for the log."""
        others = [f"{count} records left out because {reason}" for reason, count in self.left_out.items()]
        counts = f"{self.read} prompts, {self.dropped} dropped as longer than data.max_prompt_tokens"
        return f"{self.path}: {'; '.join([counts, *others])}"


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

    def together(self, find: Callable[[], Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return what each process finds. Raises UserError, in all of them, where one of them does."""
        try:
            found = {"refused": "", **find()}
        except UserError as error:
            found = {"refused": str(error)}
        every = self.tell(found)
        for refused in filter(None, (one["refused"] for one in every)):
            raise UserError(refused)
        return every


ALONE = Readers()


@dataclass(frozen=True)
class Loading:
    """How the sources of a run are read: what turns prompts into token ids, which are too long, and what is read of each example."""

    template: PromptTemplate
    max_prompt_tokens: int
    responses: bool = False
    pairs: bool = False
    in_memory: int | None = None
    """Larger sources are read from an index in `cache`; None holds all in memory."""
    cache: Path = Path()
    usual_split: str = "train"
    readers: Readers = ALONE
    """The processes that do this together. Where they are several, prompts are tokenised again when they are drawn."""

    @staticmethod
    def of(data: DataConfig, template: PromptTemplate, **asked: Any) -> "Loading":
        """Return how the sources of a configuration are read."""
        return Loading(template, data.max_prompt_tokens, in_memory=data.in_memory, cache=data.cache, **asked)

    @property
    def given(self) -> int:
        """Return how many given responses an example has."""
        return 2 if self.pairs else int(self.responses)

    def reading(self, source: SourceConfig) -> Reading:
        """Return a pass over a source."""
        return Reading(source, responses=self.responses, pairs=self.pairs, usual_split=self.usual_split)


def load_train(
    data: DataConfig, tokenizer: Any, *, responses: bool = False, pairs: bool = False,
    kept: Sequence[Sequence[int] | str] | None = None, readers: Readers = ALONE,
) -> list[LoadedSource]:  # fmt: skip
    """Load every source of `data.train`. Raises UserError when there is none, or for a file that cannot be used.

    `kept` holds another rank's `LoadedSource.kept` of each; `readers` divide the work.
    """
    check_train(data)
    template = PromptTemplate(tokenizer, data.chat_template, data.system_prompt)
    loading = Loading.of(data, template, responses=responses, pairs=pairs, readers=readers)
    sources = data.training_sources
    places = kept if kept is not None else [None] * len(sources)
    return [load_source(source, loading, of_source) for source, of_source in zip(sources, places, strict=True)]


def check_train(data: DataConfig) -> None:
    """Raise UserError where no training data is named."""
    if not data.train:
        raise UserError("data.train is not set; give it a .jsonl or .parquet file, as in data.train=train.jsonl")


def load_eval(
    data: DataConfig, tokenizer: Any, *, pairs: bool = False, kept: Mapping[str, Sequence[int] | str] | None = None,
    readers: Readers = ALONE,
) -> dict[str, LoadedSource]:  # fmt: skip
    """Load the held-out sets by name, as `load_train` does. Raises UserError for a file that cannot be used."""
    template = PromptTemplate(tokenizer, data.chat_template, data.system_prompt)
    loading = Loading.of(data, template, pairs=pairs, readers=readers)
    usual = {name: "test" if name in data.eval else "train" for name in data.evaluation_sources}
    return {
        name: load_source(source, replace(loading, usual_split=usual[name]), kept[name] if kept else None)
        for name, source in data.evaluation_sources.items()
    }


def load_texts(
    data: DataConfig, tokenizer: Any, kept: Sequence[int] | str | None = None, readers: Readers = ALONE
) -> LoadedSource:
    """Load the pre-training texts of `data.ptx`. Raises UserError when there are none, or for a file that cannot be used."""
    if data.ptx is None:
        raise UserError("data.ptx is not set, and the flow trains on pre-training text; write data.ptx=texts.jsonl")
    template = PromptTemplate(tokenizer, chat_template=False)
    return load_source(data.ptx, Loading.of(data, template, readers=readers), kept)


def load_source(source: SourceConfig, loading: Loading, kept: Sequence[int] | str | None = None) -> LoadedSource:
    """Read, tokenise and filter one source.

    Args:
        source: The file or folder and its fields.
        loading: How it is read, and by whom.
        kept: Another rank's `LoadedSource.kept` of it, in place of the filter: only prompts that are drawn are tokenised then.

    Raises:
        UserError: For a fault in the file, or when no prompt is short enough.
    """
    if isinstance(kept, str):
        return open_index(source, loading, Path(kept))
    reading, examples = loading.reading(source), list[Example]()
    if kept is None and loading.in_memory is not None:
        # The first reader decides for all: whether there is an index is a matter of time.
        first = loading.readers.rank == 0
        told = loading.readers.together(
            lambda: {"index": index_or_read(source, loading, reading, examples) if first else ""}
        )
        if told[0]["index"]:
            return open_index(source, loading, Path(told[0]["index"]))
    examples = examples or list(reading)
    if kept is not None:
        chosen = [examples[i] for i in kept]
        return LoadedSource(
            source.path, source.weight, chosen, list(kept), len(examples), loading.template, None, None,
            left_out=reading.left_out,
        )  # fmt: skip
    return load_in_memory(source, loading, examples, reading.left_out)


def load_in_memory(
    source: SourceConfig, loading: Loading, examples: Sequence[Example], left_out: Mapping[str, int]
) -> LoadedSource:
    """Return a source whose examples this process holds; where it alone tokenises them, their token ids too."""
    part = TokenizedPart()

    def tokenized() -> Mapping[str, Any]:
        nonlocal part
        part = tokenized_part(source.path, examples, loading)
        return part.found()

    every = loading.readers.together(tokenized)
    places = [place for one in every for place in one["places"]]
    if not places:
        shortest = min(one["shortest"] for one in every if one["shortest"])
        raise all_too_long(source, len(examples), loading.max_prompt_tokens, shortest)
    own = part if loading.readers.size == 1 else TokenizedPart()
    responses, rejected = (*own.given, None, None)[:2]
    return LoadedSource(
        source.path, source.weight, [examples[i] for i in places], places, len(examples), loading.template,
        own.prompts, responses, rejected,
        max(one["longest_prompt"] for one in every), max(one["longest_row"] for one in every), left_out,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class TokenizedPart:
    """The prompts of a part of a file that are short enough, with their places in it and their given responses."""

    places: Sequence[int] = ()
    prompts: Ragged | None = None
    given: tuple[Ragged, ...] = ()
    shortest: int = 0
    """Tokens of the shortest prompt of the part, kept or not."""

    def found(self) -> dict[str, Any]:
        """Return what other readers of the file have to know."""
        lengths = self.prompts.lengths if self.prompts is not None else torch.zeros(0, dtype=torch.int64)
        rows = [lengths + responses.lengths for responses in self.given]
        return {
            "places": list(self.places), "shortest": self.shortest,
            "longest_prompt": int(lengths.max()) if len(lengths) else 0,
            "longest_row": max((int(row.max()) for row in rows if len(row)), default=0),
        }  # fmt: skip


def tokenized_part(path: Path, examples: Sequence[Example], loading: Loading) -> TokenizedPart:
    """Tokenise and filter this process's part of a file's examples, with the responses that are given beside them."""
    part, limit = loading.readers.part(len(examples)), loading.max_prompt_tokens
    prompts, lengths = tokenize(path, examples[part.start : part.stop], loading.template, limit)
    places = [place for place, length in zip(part, lengths, strict=True) if length <= limit]
    texts = ([examples[i].response for i in places], [examples[i].rejected for i in places])[: loading.given]
    given = [tokenize_responses(path, [text for text in one if text is not None], loading.template) for one in texts]
    return TokenizedPart(places, prompts, tuple(given), min(lengths, default=0))


def all_too_long(source: SourceConfig, count: int, limit: int, shortest: int) -> UserError:
    """Return what is said of a source of which nothing is left."""
    return UserError(
        f"{source.path}: all {count} prompts are longer than data.max_prompt_tokens={limit}; "
        f"the shortest has {shortest} tokens"
    )


def index_or_read(source: SourceConfig, loading: Loading, reading: Reading, examples: list[Example]) -> str:
    """Return the folder of a source's index, which is written where it has to be; or nothing, and all `examples`, where these are few."""
    assert loading.in_memory is not None
    template, limit = loading.template, loading.max_prompt_tokens
    check_source(source)
    folder = index_folder(loading.cache, source, template, limit, loading.responses, loading.pairs, loading.usual_split)
    if folder.is_dir():
        return str(folder)
    read = iter(reading)
    examples += islice(read, loading.in_memory + 1)
    if len(examples) <= loading.in_memory:
        return ""
    write_index(source, loading, folder, chain(examples, read), reading.left_out)
    return str(folder)


def write_index(
    source: SourceConfig, loading: Loading, folder: Path, examples: Iterable[Example], left_out: Mapping[str, int]
) -> None:
    """Write the index of a source, batch by batch; `left_out` is complete when the last example has been taken."""
    template, limit = loading.template, loading.max_prompt_tokens
    title = f"Indexing {source.label}"
    with whole_index(folder) as partial:
        writer = IndexWriter(partial, limit, loading.given)
        for batch in with_progress(batched(examples, BATCH), None, title):
            writer.add(batch, tokenize_batch(source.path, batch, template), template)
        writer.finish(dict(left_out))
        if not writer.longest_prompt:
            raise all_too_long(source, writer.read, limit, writer.shortest)


def open_index(source: SourceConfig, loading: Loading, folder: Path) -> LoadedSource:
    """Return a source whose examples are in an index. Raises UserError where this machine does not see it."""
    if not folder.is_dir():
        raise UserError(f"there is no index {folder}; data.cache must be a folder that all machines of the run see")
    facts = read_facts(folder)
    tokens = [IndexedTokens(folder, name) for name in TOKENS[: 1 + loading.given]]
    prompts, responses, rejected = (*tokens, None, None)[:3]
    return LoadedSource(
        source.path, source.weight, IndexedExamples(folder, "examples"), str(folder), facts.read, loading.template,
        prompts, responses, rejected, facts.longest_prompt, facts.longest_row, facts.left_out, facts,
    )  # fmt: skip
