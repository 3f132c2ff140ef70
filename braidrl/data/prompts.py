"""Loading of sources: reading, tokenisation and the length filter. Prompts that are too long are dropped and counted
here.

file ─Reading─▶ examples ─PromptTemplate─▶ token ids ─at most max_prompt_tokens─▶ folder/...arrow ─mapped─▶ LoadedSource
                                                                                  folder/facts.json

Ranks write the table of a source together: each of at most MOST_PARTS tokenises every n-th batch of examples into a
part, machines exchange the parts that they lack, and all map the batches in the order of the file. All processes of a
machine share the memory pages of the files.

    rank 0: batches 0, 2, ... ──▶ folder/part-0-of-2.arrow ─┐
    rank 1: batches 1, 3, ... ──▶ folder/part-1-of-2.arrow ─┴─▶ batches 0, 1, 2, 3, ... ──▶ LoadedSource

A long file whose lines are examples is *opened*: the run starts while the parts are written (`data/opening.py`).

The columns of a table:

example                        JSON of an `Example`
images                         JSON of the spans of images, in the prompt and in each response; of a model that sees
prompt, response, rejected     int32 token ids; `response_trained` and `rejected_trained` are masks of the trained ones
"""

import glob
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import chain, islice
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from braidrl.config import DataConfig, SourceConfig
from braidrl.data.conversions import CONVERSIONS
from braidrl.data.lines import Lines, has_more_lines, index_lines
from braidrl.data.opening import Opening, opened
from braidrl.data.sources import Example, Reading
from braidrl.data.tables import (
    BATCH,
    RESPONSES,
    Facts,
    LoadingRanks,
    SingleProcess,
    own_batches_of,
    part_of,
    part_writers,
    shown,
    with_progress,
    write_part,
)
from braidrl.data.templates import PromptTemplate
from braidrl.data.vision import ImageSpan, Vision, moved
from braidrl.deferred import Tensor, torch
from braidrl.errors import UserError

LINES, PARTS = "lines.index", "parts.json"
"""Files of a table's folder: the index of the file's lines, and the number of parts and batches."""
EXCHANGED_BYTES = 64 << 20
PASSING = "braid-data-"
PACKAGES = ("pyarrow", "transformers", "tokenizers", "jinja2")
"""Packages whose versions affect the contents of a table."""


class LoadedSource(Sequence[Example]):
    """The examples of a source that passed the length filter, with their token ids, mapped from a file."""

    def __init__(
        self, source: SourceConfig, table: Any, facts: Facts, folder: Path, opening: Opening | None = None
    ) -> None:
        """Use a table, or an `opening` that makes rows until the table is complete."""
        self.path, self.weight, self.facts, self.kept, self.opening = (
            source.path,
            source.weight,
            facts,
            str(folder),
            opening,
        )
        # Reading a cell of a mapped column takes microseconds; a row through the data set takes a hundred times as
        # long.
        self._columns = {} if table is None else {name: table.column(name) for name in table.column_names}

    def __len__(self) -> int:
        return len(self.opening if self.opening is not None else self._columns["example"])

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        if self.opening is not None:
            return Example(*json.loads(self.opening.row(index)["example"]))
        return Example(*json.loads(self._columns["example"][index].as_py()))

    def stop(self) -> None:
        """End the reading of an opened source."""
        if self.opening is not None:
            self.opening.stop()

    @property
    def dropped(self) -> int:
        """Return the number of prompts that are too long."""
        return self.facts.read - len(self)

    def settle(self, ranks: LoadingRanks | None = None, wait: bool = False) -> bool:
        """Map the table of an opened source once all ranks have written it, with `wait` after waiting; return True if
        this call mapped it.

        All ranks call this together. Raises UserError in all ranks, for the first invalid example of the file.
        """
        if self.opening is None:
            return False
        opening, ranks = self.opening, ranks or SingleProcess()
        is_written = opening.is_written(wait, shows=ranks.rank == 0)
        if not all(ranks.gather(f"data {self.path}: read", is_written)):
            return False
        table, facts = finished(opening.reading, opening.data, ranks, Path(self.kept), opening.outcome())
        if facts.read - table.num_rows != len(opening.dropped):
            raise UserError(
                f"{self.path}: {facts.read - table.num_rows - len(opening.dropped)} of its prompts have more than "
                f"data.max_prompt_tokens={opening.data.max_prompt_tokens} tokens though their lines are short; remove "
                "them, or raise data.max_prompt_tokens"
            )
        opening.stop()
        self.facts, self.opening = facts, None
        self._columns = {name: table.column(name) for name in table.column_names}
        return True

    def images(self, index: int) -> list[list[ImageSpan]] | None:
        """Return the images in an example's prompt and in each of its responses; None for a text-only model."""
        if "images" not in self._columns:
            return None
        return [moved(spans, 0) for spans in json.loads(self._columns["images"][index].as_py())]

    def prompt(self, index: int) -> Tensor:
        """Return token ids (T,) int64 of an example's prompt."""
        if self.opening is not None:
            return torch.tensor(self.opening.row(index)["prompt"], dtype=torch.int64)
        return torch.from_numpy(self._columns["prompt"][index].values.to_numpy().astype(np.int64))

    def response(self, index: int, which: str = "response") -> tuple[Tensor, Tensor] | None:
        """Return the token ids (T,) int64 of an example's response and its mask of trained tokens (T,) bool; None if
        the source has no responses.
        """
        if which not in self._columns:
            return None
        ids, trained = self._columns[which][index].values, self._columns[f"{which}_trained"][index].values
        # Arrow packs eight booleans in a byte: they are copied.
        mask = torch.from_numpy(trained.to_numpy(zero_copy_only=False).astype(bool))
        return torch.from_numpy(ids.to_numpy().astype(np.int64)), mask

    def report(self) -> str:
        """Return a line for the log: numbers of prompts and dropped prompts, and omitted records and columns."""
        counts = f"{self.facts.read} prompts, {self.dropped} dropped as longer than data.max_prompt_tokens"
        if self.opening is not None:
            counts += "; its lines are checked and tokenised while the run goes on"
        return f"{self.path}: {'; '.join([counts, *self.omissions()])}"

    def omissions(self) -> list[str]:
        """Return a text for each kind of record, column or field that is not trained on."""
        facts = self.facts
        texts = [f"{count} records left out because {reason}" for reason, count in facts.left_out.items()]
        texts += [f"column {name!r} left out, for which JSON has no form" for name in facts.without_form]
        if facts.unread:
            who = "not trained on" if "response" in self._columns else "for verifiers and environments alone"
            texts += [f"{who}: {', '.join(sorted(facts.unread))}"]
        return texts + [f"{note}; line {line} is the first example that has some" for note, line in facts.notes.items()]

    def first_beyond(self, size: int) -> tuple[int, int] | None:
        """Return the first row with a token id of `size` or more, and that id; None if there is no such row."""
        beyond = []
        for name in ("prompt", *RESPONSES):
            begin = 0
            for chunk in self._columns[name].chunks if name in self._columns else ():
                values = chunk.flatten().to_numpy()
                for at in np.flatnonzero(values >= size)[:1]:
                    row = int(np.searchsorted(chunk.offsets.to_numpy() - chunk.offsets[0].as_py(), at, "right")) - 1
                    beyond.append((begin + row, int(values[at])))
                begin += len(chunk)
        return min(beyond, default=None)

    def lengths(self, column: str) -> Tensor | None:
        """Return the number of tokens of every row, (K,) int64, or None if the source has no such column."""
        import pyarrow.compute

        if column not in self._columns:
            return None
        return torch.from_numpy(pyarrow.compute.list_value_length(self._columns[column]).to_numpy().astype(np.int64))


def load_train(
    data: DataConfig,
    tokenizer: Any,
    *,
    responses: bool = False,
    pairs: bool = False,
    kept: Sequence[str] | None = None,
    vision: Vision | None = None,
    ranks: LoadingRanks | None = None,
    opens: bool = False,
) -> list[LoadedSource]:
    """Load each source of `data.train` together with `ranks`.

    `kept` are the `LoadedSource.kept` of another process. With `opens`, the caller can use sources whose tables are
    still being written, and calls `settle`. Raises UserError if there are no sources, or for an invalid file.
    """
    check_train(data)
    template = PromptTemplate.of(tokenizer, data, vision)
    readings = [Reading(source, responses=responses, pairs=pairs, vision=vision) for source in data.training_sources]
    kept_folders = kept if kept is not None else [None] * len(readings)
    return [
        load_source(r, data, template, folders, ranks, opens) for r, folders in zip(readings, kept_folders, strict=True)
    ]


def check_train(data: DataConfig) -> None:
    if not data.train:
        raise UserError("data.train is not set; give it a .jsonl or .parquet file, as in data.train=train.jsonl")


def load_eval(
    data: DataConfig,
    tokenizer: Any,
    *,
    responses: bool = False,
    pairs: bool = False,
    kept: Mapping[str, str] | None = None,
    vision: Vision | None = None,
    ranks: LoadingRanks | None = None,
) -> dict[str, LoadedSource]:
    """Load the held-out sets by name, as `load_train` does. Raises UserError for an invalid file."""
    template, sets = PromptTemplate.of(tokenizer, data, vision), {}
    for name, source in data.evaluation_sources.items():
        split = "test" if name in data.eval else "train"
        reading = Reading(source, responses=responses, pairs=pairs, usual_split=split, vision=vision)
        sets[name] = load_source(reading, data, template, kept[name] if kept else None, ranks)
    return sets


def load_texts(
    data: DataConfig, tokenizer: Any, kept: str | None = None, ranks: LoadingRanks | None = None
) -> LoadedSource:
    """Load the pre-training texts of `data.ptx`. Raises UserError if there are none, or for an invalid file."""
    if data.ptx is None:
        raise UserError("data.ptx is not set, and the flow trains on pre-training text; write data.ptx=texts.jsonl")
    return load_source(Reading(data.ptx), data, PromptTemplate(tokenizer, chat_template=False), kept, ranks)


def load_source(
    reading: Reading,
    data: DataConfig,
    template: PromptTemplate,
    kept: str | None = None,
    ranks: LoadingRanks | None = None,
    opens: bool = False,
) -> LoadedSource:
    """Read, tokenize and filter one source, alone or together with `ranks`, or map another process's table of it.

    `kept` is another process's `LoadedSource.kept` of it; if this machine does not have that folder, the source is read
    into it. With `opens`, a long source may be returned before its table is complete. Raises UserError in all ranks,
    for the first invalid example of the file, or if no prompt is short enough.
    """
    ranks, source, purpose = ranks or SingleProcess(), reading.source, f"data {reading.source.label}"
    folder, examples = (Path(kept), None) if kept else shared_folder(reading, data, template, ranks)
    if all(ranks.gather(f"{purpose}: kept", (folder / "facts.json").is_file())):
        return LoadedSource(source, *mapped(folder), folder)
    # The process that created the folder of a temporary table removes it after use.
    mine = folder.name.startswith(PASSING) and not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lines = indexed(reading, folder, ranks) if reading.is_plain else None
    if lines is not None and not len(lines):
        raise reading.no_examples
    opening = opened(reading, data, template, ranks, lines, folder) if opens and lines is not None else None
    if opening is not None:
        loaded = LoadedSource(source, None, opening.facts, folder, opening)
    else:
        try:
            share = own_batches_of(reading, ranks, examples or iter(reading), lines)
            outcome = write_part(share, template, data, folder, shows=ranks.rank == 0)
        except UserError as error:
            outcome = {"refused": str(error), "batch": sys.maxsize}
        loaded = LoadedSource(source, *finished(reading, data, ranks, folder, outcome), folder)
    if mine:
        # `weakref.finalize` does not run at the end of a process that multiprocessing has started.
        Finalize(loaded, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)
    return loaded


def shared_folder(
    reading: Reading, data: DataConfig, template: PromptTemplate, ranks: LoadingRanks
) -> tuple[Path, Iterator[Example] | None]:
    """Return the folder of a source's table, the same for all ranks, and on the first rank the examples. Raises
    UserError in all ranks.
    """
    temporary, examples, named = Path(tempfile.gettempdir()), None, dict[str, Any]()
    if ranks.rank == 0:
        try:
            folder, examples = new_folder(reading, data, template)
            named = {"name": folder.name, "temporary": folder.parent == temporary}
        except UserError as error:
            named = {"refused": str(error)}
    named = ranks.gather(f"data {reading.source.label}", named)[0]
    if "refused" in named:
        raise UserError(named["refused"])
    return (temporary if named["temporary"] else data.cache.expanduser()) / named["name"], examples


def indexed(reading: Reading, folder: Path, ranks: LoadingRanks) -> Lines:
    """Return the lines of a source; the first rank of each machine writes their index."""
    purpose, refused = f"data {reading.source.label}: lines", ""
    machines = ranks.gather(f"{purpose}: machines", machine_of(folder))
    if machines.index(machines[ranks.rank]) == ranks.rank:
        path = reading.source.path
        progress = shown(f"Reading {reading.source.label}", path.stat().st_size) if not ranks.rank else nullcontext(int)
        try:
            with progress as update:
                index_lines(path, folder / LINES, update)
        except OSError as error:
            refused = f"{folder / LINES}: the index of {reading.source.path} cannot be written: {error.strerror}"
    if refused := max(ranks.gather(purpose, refused)):
        raise UserError(refused)
    return Lines(reading.source.path, folder / LINES)


def finished(
    reading: Reading, data: DataConfig, ranks: LoadingRanks, folder: Path, outcome: dict[str, Any]
) -> tuple[Any, Facts]:
    """Return the table and statistics of a source after every rank has written its part; `outcome` is this rank's.

    Raises UserError in all ranks, for the first invalid example of the file.
    """
    purpose = f"data {reading.source.label}"
    outcomes = ranks.gather(f"{purpose}: parts", outcome)
    refused, facts = [part for part in outcomes if "refused" in part], Facts()
    if not refused:
        facts = Facts.of_parts([part["facts"] for part in outcomes if part])
        if not facts.longest_prompt:
            too_long = (
                f"{reading.source.path}: all {facts.read} prompts are longer than "
                f"data.max_prompt_tokens={data.max_prompt_tokens}; the shortest has {facts.shortest} tokens"
            )
            refused = [{"refused": too_long, "batch": 0}]
    if refused:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(min(refused, key=lambda part: part["batch"])["refused"])
    exchange_parts(folder, ranks, purpose)
    layout = {"parts": len(part_writers(ranks.size)), "batches": outcomes[0]["batches"]}
    for name, value in ((PARTS, layout), ("facts.json", asdict(facts))):
        # Ranks of one machine write the same file, as do runs that cache the same table.
        unfinished = folder / f"{name}.{uuid.uuid4().hex}"
        unfinished.write_text(json.dumps(value), encoding="utf-8")
        unfinished.replace(folder / name)
    return mapped(folder)


def exchange_parts(folder: Path, ranks: LoadingRanks, purpose: str) -> None:
    """Copy to each machine the parts that its folder lacks, in rounds of bounded bytes; if all share a folder, no parts
    move.

    A rank with a part sends it to the first rank of each machine that lacks it.
    """
    writers = part_writers(ranks.size)
    files = [part_of(folder, number, len(writers)) for number in range(len(writers))]
    lacking = [number for number, file in enumerate(files) if not file.is_file()]
    needs: list[tuple[str, list[int]]] = ranks.gather(f"{purpose}: lacking", [machine_of(folder), lacking])
    if not any(parts for _, parts in needs):
        return
    machines = [machine for machine, _ in needs]
    receives = [machines.index(machine) == rank for rank, machine in enumerate(machines)]
    mine = writers.index(ranks.rank) if ranks.rank in writers else None
    receivers = [rank for rank, (_, parts) in enumerate(needs) if receives[rank] and mine in parts]
    senders = {writers[number]: files[number].with_suffix(".unfinished") for number in lacking if receives[ranks.rank]}
    size = files[mine].stat().st_size if mine is not None else 0
    rounds = max(ranks.gather(f"{purpose}: sizes", -(-size // EXCHANGED_BYTES)))
    with files[mine].open("rb") if mine is not None else io.BytesIO() as file:
        for number in range(rounds):
            piece = file.read(EXCHANGED_BYTES)
            for sender, part in ranks.exchange(purpose, dict.fromkeys(receivers, piece), senders).items():
                with senders[sender].open("wb" if not number else "ab") as target:
                    target.write(part)
    for sender, unfinished in senders.items():
        unfinished.replace(files[writers.index(sender)])
    ranks.gather(f"{purpose}: received", None)


def machine_of(folder: Path) -> str:
    """Return an id of the folder that is equal only on machines that share it."""
    return f"{platform.node()}:{folder}:{folder.stat().st_dev}:{folder.stat().st_ino}"


def mapped(folder: Path) -> tuple[Any, Facts]:
    """Return the table in a folder, with the batches of its parts in the order of the file, and its statistics."""
    import pyarrow

    layout = json.loads((folder / PARTS).read_text(encoding="utf-8"))
    size = layout["parts"]
    files = [pyarrow.ipc.open_file(pyarrow.memory_map(str(part_of(folder, rank, size)))) for rank in range(size)]
    batches = [files[number % size].get_batch(number // size) for number in range(layout["batches"])]
    table = pyarrow.Table.from_batches([batch for batch in batches if batch.num_rows], files[0].schema)
    return table, Facts(**json.loads((folder / "facts.json").read_text(encoding="utf-8")))


def new_folder(reading: Reading, data: DataConfig, template: PromptTemplate) -> tuple[Path, Iterator[Example] | None]:
    """Return the folder of a source's table, and the examples to write to it, some of which may already be read.

    A large source has a folder in the cache; its name depends on files, settings, code and tokenizer. The folder is
    temporary for a small source, and for unknown code: a conversion without a version, or a tokenizer with custom code.
    """
    source, tokenizer = reading.source, template.tokenizer
    examples: Iterator[Example] | None = None
    own_conversion = source.convert is not None and source.convert not in CONVERSIONS
    separate_tokenizer = not tokenizer.is_fast or not type(tokenizer).__module__.startswith("transformers.")
    if not separate_tokenizer and (source.convert_version is not None or not own_conversion):
        files = (
            sorted(path for path in source.path.rglob("*") if path.is_file()) if source.path.is_dir() else [source.path]
        )
        chat = tokenizer.chat_template if template.is_chat else None
        described = [
            [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files],
            source.model_dump(mode="json", exclude={"weight", "verify"}),
            [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))],
            [importlib.metadata.version(name) for name in PACKAGES],
            tokenizer.backend_tokenizer.to_str(),
            repr(tokenizer.special_tokens_map),
            chat,
            # Some templates write the date into the prompt.
            time.strftime("%Y-%m-%d") if "strftime" in str(chat) else "",
            template.system_prompt,
            template.vision.described if template.vision else "",
            str(template.vision.store) if template.vision else "",
            repr(dict(template.arguments)),
            data.max_prompt_tokens,
            reading.responses,
            reading.pairs,
            reading.usual_split,
        ]
        name = hashlib.blake2b(json.dumps(described, default=str).encode(), digest_size=16).hexdigest()
        folder = data.cache.expanduser() / f"{source.label}-{name}"
        if folder.is_dir() or (reading.is_plain and has_more_lines(source.path, data.in_memory)):
            return folder, None
        if not reading.is_plain:
            others = iter(reading)
            first = islice(others, data.in_memory + 1)
            batches = with_progress(iter(lambda: list(islice(first, BATCH)), []), f"Reading {source.label}")
            started = [example for batch in batches for example in batch]
            examples = chain(started, others)
            if len(started) > data.in_memory:
                return folder, examples
    prefix, temporary = f"{PASSING}{platform.node()}-", Path(tempfile.gettempdir())
    for earlier in temporary.glob(f"{glob.escape(prefix)}*"):
        # Folders of processes that were killed are removed.
        process = earlier.name.removeprefix(prefix).partition("-")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            shutil.rmtree(earlier, ignore_errors=True)
    return temporary / f"{prefix}{os.getpid()}-{uuid.uuid4().hex}", examples
