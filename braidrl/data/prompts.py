"""Loading of sources: reading, tokenisation and the length filter. Prompts that are too long are dropped and counted here.

file ──Reading──▶ examples ──PromptTemplate──▶ token ids ──at most max_prompt_tokens──▶ Arrow file ──mapped──▶ LoadedSource

One process writes the table of a source; the others of its machine map the same file.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from braidrl.config import DataConfig
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


def load_train(
    data: DataConfig, tokenizer: Any, *, responses: bool = False, pairs: bool = False,
    kept: Sequence[str] | None = None, readers: Readers = ALONE,
) -> list[LoadedSource]:  # fmt: skip
    """Load every source of `data.train`. Raises UserError if there is none, or for an invalid file.

    `kept` has another rank's `LoadedSource.kept` for each source; `readers` load them together.
    """
    check_train(data)
    template = PromptTemplate.of(tokenizer, data)
    readings = [Reading(source, responses=responses, pairs=pairs) for source in data.training_sources]
    places = kept if kept is not None else [None] * len(readings)
    return [load_source(one, data, template, place, readers) for one, place in zip(readings, places, strict=True)]


def check_train(data: DataConfig) -> None:
    if not data.train:
        raise UserError("data.train is not set; give it a .jsonl or .parquet file, as in data.train=train.jsonl")


def load_eval(
    data: DataConfig, tokenizer: Any, *, pairs: bool = False, kept: Mapping[str, str] | None = None,
    readers: Readers = ALONE,
) -> dict[str, LoadedSource]:  # fmt: skip
    """Load the held-out sets by name, as `load_train` does. Raises UserError for an invalid file."""
    template, found = PromptTemplate.of(tokenizer, data), {}
    for name, source in data.evaluation_sources.items():
        reading = Reading(source, pairs=pairs, usual_split="test" if name in data.eval else "train")
        found[name] = load_source(reading, data, template, kept[name] if kept else None, readers)
    return found


def load_texts(data: DataConfig, tokenizer: Any, kept: str | None = None, readers: Readers = ALONE) -> LoadedSource:
    """Load the pre-training texts of `data.ptx`. Raises UserError if there are none, or for an invalid file."""
    if data.ptx is None:
        raise UserError("data.ptx is not set, and the flow trains on pre-training text; write data.ptx=texts.jsonl")
    return load_source(Reading(data.ptx), data, PromptTemplate(tokenizer, chat_template=False), kept, readers)


def load_source(
    reading: Reading, data: DataConfig, template: PromptTemplate, kept: str | None = None, readers: Readers = ALONE
) -> LoadedSource:
    """Read, tokenise and filter one source, or map another process's table of it.

    `kept` is another rank's `LoadedSource.kept` of it; if this machine does not have that folder, the source is read into it.
    Raises UserError if the file is invalid, or no prompt is short enough.
    """
    source, given = reading.source, 2 if reading.pairs else int(reading.responses)
    check_source(source)
    found: list[LoadedSource] = []

    def first() -> str:
        """Open the table in the cache, or write a new one, to the cache if the source is large enough."""
        further = (data.max_prompt_tokens, reading.responses, reading.pairs, reading.usual_split)
        keep = kept_folder(data.cache, source, template, *further)
        begun, rest = list[Example](), iter(reading)
        if keep is not None and not keep.is_dir():
            begun = list(islice(rest, data.in_memory + 1))
            keep = keep if len(begun) > data.in_memory else None
        rows = partial(rows_of, reading, chain(begun, rest), template, data.max_prompt_tokens, given)
        found.append(open_table(source, keep or passing_folder(), rows, given))
        return found[0].kept

    folder = readers.first(first) if kept is None else kept
    if found:
        return found[0]
    rows = partial(rows_of, reading, iter(reading), template, data.max_prompt_tokens, given)
    return open_table(source, Path(folder), rows, given)


def rows_of(
    reading: Reading, examples: Iterator[Example], template: PromptTemplate, limit: int, given: int, facts: Facts
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a source's table and fill in the facts; `examples` is a pass of `reading`.

    Raises UserError, with the location, for an invalid example, and if no prompt is short enough.
    """
    path, title = reading.source.path, f"Tokenising {reading.source.label}"
    for batch in with_progress(iter(lambda: list(islice(examples, BATCH)), []), title):
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
            with located(path, example):
                answers = [answer for answer in (example.response, example.rejected)[:given] if answer is not None]
                responses = template.encode_given(example, answers)
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
