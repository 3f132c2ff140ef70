"""Loading of sources: reading, tokenisation and the length filter. Prompts that are too long are dropped and counted here.

file ──Reading──▶ examples ──PromptTemplate──▶ token ids ──at most max_prompt_tokens──▶ Arrow file ──mapped──▶ LoadedSource

One process writes the table of a source; the others of its machine map the same file.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from braidrl.config import DataConfig, SourceConfig
from braidrl.data.example_table import (
    RESPONSES,
    Facts,
    LoadedSource,
    kept_folder,
    open_table,
    passing_folder,
    with_progress,
)
from braidrl.data.records import check_source, place
from braidrl.data.sources import Example, Reading
from braidrl.data.templates import PromptTemplate
from braidrl.errors import UserError

BATCH = 512


@dataclass(frozen=True)
class Readers:
    """The processes that read the same files: the first one writes the tables, and all of them map these."""

    rank: int = 0
    size: int = 1
    tell: Callable[[Any], list[Any]] = lambda said: [said]
    """All-gather: returns the JSON values of all processes in the order of ranks."""

    def first(self, find: Callable[[], str]) -> str:
        """Return the result of the first process. A UserError of the first process is raised in all of them."""
        found = {"refused": "", "found": ""}
        if self.rank == 0:
            try:
                found["found"] = find()
            except UserError as error:
                found["refused"] = str(error)
        first = self.tell(found)[0]
        if first["refused"]:
            raise UserError(first["refused"])
        return str(first["found"])


ALONE = Readers()


@dataclass(frozen=True)
class Loading:
    """Options for loading the sources of a run: prompt template, length limit, and fields to read."""

    template: PromptTemplate
    max_prompt_tokens: int
    responses: bool = False
    pairs: bool = False
    in_memory: int | None = None
    """Tables of sources with more examples than this are kept in `cache`; None keeps none."""
    cache: Path = Path()
    usual_split: str = "train"
    readers: Readers = ALONE
    """The processes that load together."""

    @staticmethod
    def of(data: DataConfig, template: PromptTemplate, **asked: Any) -> "Loading":
        """Return the options of a configuration."""
        return Loading(template, data.max_prompt_tokens, in_memory=data.in_memory, cache=data.cache, **asked)

    @property
    def given(self) -> int:
        """Return the number of given responses per example."""
        return 2 if self.pairs else int(self.responses)


def load_train(
    data: DataConfig, tokenizer: Any, *, responses: bool = False, pairs: bool = False,
    kept: Sequence[str] | None = None, readers: Readers = ALONE,
) -> list[LoadedSource]:  # fmt: skip
    """Load every source of `data.train`. Raises UserError if there is none, or for an invalid file.

    `kept` has another rank's `LoadedSource.kept` for each source; `readers` load them together.
    """
    check_train(data)
    template = PromptTemplate.of(tokenizer, data)
    loading = Loading.of(data, template, responses=responses, pairs=pairs, readers=readers)
    sources = data.training_sources
    places = kept if kept is not None else [None] * len(sources)
    return [load_source(source, loading, of_source) for source, of_source in zip(sources, places, strict=True)]


def check_train(data: DataConfig) -> None:
    """Raise UserError if no training data is configured."""
    if not data.train:
        raise UserError("data.train is not set; give it a .jsonl or .parquet file, as in data.train=train.jsonl")


def load_eval(
    data: DataConfig, tokenizer: Any, *, pairs: bool = False, kept: Mapping[str, str] | None = None,
    readers: Readers = ALONE,
) -> dict[str, LoadedSource]:  # fmt: skip
    """Load the held-out sets by name, as `load_train` does. Raises UserError for an invalid file."""
    template = PromptTemplate.of(tokenizer, data)
    loading = Loading.of(data, template, pairs=pairs, readers=readers)
    usual = {name: "test" if name in data.eval else "train" for name in data.evaluation_sources}
    return {
        name: load_source(source, replace(loading, usual_split=usual[name]), kept[name] if kept else None)
        for name, source in data.evaluation_sources.items()
    }


def load_texts(data: DataConfig, tokenizer: Any, kept: str | None = None, readers: Readers = ALONE) -> LoadedSource:
    """Load the pre-training texts of `data.ptx`. Raises UserError if there are none, or for an invalid file."""
    if data.ptx is None:
        raise UserError("data.ptx is not set, and the flow trains on pre-training text; write data.ptx=texts.jsonl")
    template = PromptTemplate(tokenizer, chat_template=False)
    return load_source(data.ptx, Loading.of(data, template, readers=readers), kept)


def load_source(source: SourceConfig, loading: Loading, kept: str | None = None) -> LoadedSource:
    """Read, tokenise and filter one source, or map another process's table of it.

    Args:
        source: The file or folder and its fields.
        loading: The options.
        kept: Another rank's `LoadedSource.kept` of it. If this machine does not have that folder, the source is read into it.

    Raises:
        UserError: The file is invalid, or no prompt is short enough.
    """
    check_source(source)
    found: list[LoadedSource] = []
    reading = Reading(source, responses=loading.responses, pairs=loading.pairs, usual_split=loading.usual_split)

    def first() -> str:
        """Open the table in the cache, or write a new one, to the cache if the source is large enough."""
        further = (loading.max_prompt_tokens, loading.responses, loading.pairs, loading.usual_split)
        keep = None if loading.in_memory is None else kept_folder(loading.cache, source, loading.template, *further)
        begun, rest = list[Example](), iter(reading)
        if keep is not None and not keep.is_dir():
            assert loading.in_memory is not None
            begun = list(islice(rest, loading.in_memory + 1))
            keep = keep if len(begun) > loading.in_memory else None
        rows = partial(rows_of, source, loading, reading, chain(begun, rest))
        found.append(open_table(source, keep or passing_folder(), rows, loading.given))
        return found[0].kept

    folder = loading.readers.first(first) if kept is None else kept
    if found:
        return found[0]
    return open_table(source, Path(folder), partial(rows_of, source, loading, reading, iter(reading)), loading.given)


def rows_of(
    source: SourceConfig, loading: Loading, reading: Reading, examples: Iterator[Example], facts: Facts
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a source's table and fill in the facts; `examples` is a pass of `reading`.

    Raises UserError, with the location, for an invalid example, and if no prompt is short enough.
    """
    path, template, limit = source.path, loading.template, loading.max_prompt_tokens
    for batch in with_progress(iter(lambda: list(islice(examples, BATCH)), []), f"Tokenising {source.label}"):
        facts.read += len(batch)
        texts = []
        for example in batch:
            with located(path, example):
                texts.append(template.with_arguments(example.arguments).render(example.prompt, example.tools))
        prompts = template.encode_text(texts)
        for example, ids in zip(batch, prompts, strict=True):
            if not ids:
                where = place(path, example.line)
                raise UserError(f"{where}: the tokenizer makes no token of this prompt; write some text")
        facts.shortest = min(facts.shortest or len(prompts[0]), *map(len, prompts), len(prompts[0]))
        for example, ids in zip(batch, prompts, strict=True):
            if len(ids) > limit:
                continue
            row = {"example": json.dumps(astuple(example), separators=(",", ":")), "prompt": ids}
            given = (example.response, example.rejected)[: loading.given]
            with located(path, example):
                responses = template.encode_given(example, [answer for answer in given if answer is not None])
            for name, response in zip(RESPONSES, responses, strict=False):
                row |= {name: response.ids, f"{name}_trained": response.trained}
                facts.longest_row = max(facts.longest_row, len(ids) + len(response.ids))
            facts.longest_prompt = max(facts.longest_prompt, len(ids))
            if example.answer is None and facts.unanswered is None:
                facts.unanswered, facts.unanswered_fields = example.line, list(example.metadata)
            yield row
    facts.left_out, facts.without_form = dict(reading.left_out), reading.without_form
    if not facts.longest_prompt:
        raise UserError(
            f"{path}: all {facts.read} prompts are longer than data.max_prompt_tokens={limit}; the shortest has {facts.shortest} tokens"
        )


@contextmanager
def located(path: Path, example: Example) -> Iterator[None]:
    """Add an example's location to any UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place(path, example.line)}: {error}") from None
