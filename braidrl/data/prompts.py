"""Loading of sources: reading, tokenisation and the length filter. Prompts that are too long are dropped and counted
here.

file ─Reading─▶ examples ─PromptTemplate─▶ token ids ─at most max_prompt_tokens─▶ folder/...arrow ─mapped─▶ LoadedSource
                                                                                  folder/facts.json

One process writes the table of a source, by `datasets`; all processes of its machine map the file and share its memory
pages. Ranks write it together: each of at most MOST_PARTS tokenises every n-th batch of examples into a part,
machines exchange the parts that they lack, and all map the batches in the order of the file.

    rank 0: batches 0, 2, ... ──▶ folder/part-0-of-2.arrow ─┐
    rank 1: batches 1, 3, ... ──▶ folder/part-1-of-2.arrow ─┴─▶ batches 0, 1, 2, 3, ... ──▶ LoadedSource

Its columns:

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
import re
import shutil
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, field
from itertools import chain, count, islice
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from braidrl.config import DataConfig, SourceConfig
from braidrl.data.chat import READ, UNREAD_TOOLS, special_text
from braidrl.data.conversions import CONVERSIONS
from braidrl.data.images import names_in
from braidrl.data.records import place, quiet
from braidrl.data.sources import Example, Reading
from braidrl.data.templates import PromptTemplate
from braidrl.data.vision import ImageSpan, Vision, moved
from braidrl.errors import UserError, located, no_room

RESPONSES = ("response", "rejected")
BATCH, SHARED_BATCH, SMALL_BATCHES = 512, 64, 8
"""Examples that are tokenised in one call; by several ranks fewer in each rank's first batches, so that small sources
have a batch for each.
"""
MOST_PARTS = 64
"""Parts of a table: each rank opens all of them."""
PARTS = "parts.json"
"""The file of a table's folder with the number of its parts and batches; absent for a table in one part."""
EXCHANGED_BYTES = 64 << 20
PROGRESS_AFTER_S = 2.0
PASSING = "braid-data-"
PACKAGES = ("datasets", "pyarrow", "transformers", "tokenizers", "jinja2")
"""Packages whose versions affect the contents of a table."""


@dataclass
class Facts:
    """Statistics of a source, collected in one pass over its examples."""

    read: int = 0
    """Number of examples, including those that are too long."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of skipped records by reason."""
    without_form: list[str] = field(default_factory=list)
    """Columns without a JSON form, which are omitted."""
    longest_prompt: int = 0
    longest_row: int = 0
    """Tokens of the longest prompt, and of the longest prompt with a given response (0 without responses)."""
    shortest: int = 0
    """Tokens of the shortest prompt, dropped prompts included."""
    unanswered: int | None = None
    """Line of the first example without an answer, if any."""
    unanswered_fields: list[str] = field(default_factory=list)
    """Other fields of that example."""
    images: dict[str, int] = field(default_factory=dict)
    """Number of examples by their number of images, for a model that sees."""
    notes: dict[str, int] = field(default_factory=dict)
    """What of the examples is not used, each with the line of the first one."""

    @staticmethod
    def of_parts(parts: Sequence[Mapping[str, Any]]) -> "Facts":
        """Return the statistics of a source from those of its parts."""
        each = [Facts(**part) for part in parts]
        notes = {note: min(one.notes.get(note, sys.maxsize) for one in each) for one in each for note in one.notes}
        images = sum((Counter(one.images) for one in each), Counter[str]())
        unanswered = min(
            (one for one in each if one.unanswered is not None), key=lambda one: one.unanswered or 0, default=None
        )
        return Facts(
            read=sum(one.read for one in each),
            left_out=each[0].left_out,
            without_form=each[0].without_form,
            longest_prompt=max(one.longest_prompt for one in each),
            longest_row=max(one.longest_row for one in each),
            shortest=min((one.shortest for one in each if one.shortest), default=0),
            unanswered=unanswered.unanswered if unanswered else None,
            unanswered_fields=unanswered.unanswered_fields if unanswered else [],
            notes=notes,
            images=dict(images),
        )


class LoadingRanks(Protocol):
    """The ranks that load data together, such as a `World`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, purpose: str, value: Any) -> list[Any]:
        """Return the messages of all ranks."""

    def exchange(
        self, purpose: str, messages: Mapping[int, bytes | bytearray], senders: Collection[int]
    ) -> Mapping[int, memoryview]:
        """Send bytes to some ranks, and return those that each of the senders has for this one."""


class LoadedSource(Sequence[Example]):
    """The examples of a source that passed the length filter, with their token ids, mapped from a file."""

    def __init__(self, source: SourceConfig, table: Any, facts: Facts, folder: Path) -> None:
        self.path, self.weight, self.facts, self.kept = source.path, source.weight, facts, str(folder)
        self.dropped = facts.read - table.num_rows
        """Number of prompts that were too long."""
        # Reading a cell of a mapped column takes microseconds; a row through the data set takes a hundred times as
        # long.
        self._columns = {name: table.column(name) for name in table.column_names}

    def __len__(self) -> int:
        return len(self._columns["example"])

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        return Example(*json.loads(self._columns["example"][index].as_py()))

    def images(self, index: int) -> list[list[ImageSpan]] | None:
        """Return the images in an example's prompt and in each of its given responses; None if the model sees none."""
        if "images" not in self._columns:
            return None
        return [moved(spans, 0) for spans in json.loads(self._columns["images"][index].as_py())]

    def prompt(self, index: int) -> Tensor:
        """Return token ids (T,) int64 of an example's prompt."""
        return torch.from_numpy(self._columns["prompt"][index].values.to_numpy().astype(np.int64))

    def response(self, index: int, which: str = "response") -> tuple[Tensor, Tensor] | None:
        """Return a given response's token ids (T,) int64 and the mask of trained ones (T,) bool; None if the source was
        loaded without.
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
        return f"{self.path}: {'; '.join([counts, *self.omissions()])}"

    def omissions(self) -> list[str]:
        """Return a text for each kind of record, column or field that is not trained on."""
        facts = self.facts
        said = [f"{count} records left out because {reason}" for reason, count in facts.left_out.items()]
        said += [f"column {name!r} left out, for which JSON has no form" for name in facts.without_form]
        return said + [f"{note}; line {line} is the first example that has some" for note, line in facts.notes.items()]

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


def with_progress(
    batches: Iterable[list[Example]], title: str, after_s: float = PROGRESS_AFTER_S
) -> Iterator[list[Example]]:
    """Yield the same batches, and show a progress bar on stderr after `after_s` seconds."""
    started, done = time.monotonic(), 0
    with ExitStack() as stack:
        progress: Progress | None = None
        for batch in batches:
            if progress is None and time.monotonic() - started >= after_s:
                progress = stack.enter_context(Progress(console=Console(stderr=True)))
                task = progress.add_task(title, total=None)
            yield batch
            done += len(batch)
            if progress is not None:
                progress.update(task, completed=done)


def load_train(
    data: DataConfig,
    tokenizer: Any,
    *,
    responses: bool = False,
    pairs: bool = False,
    kept: Sequence[str] | None = None,
    vision: Vision | None = None,
    ranks: LoadingRanks | None = None,
) -> list[LoadedSource]:
    """Load each source of `data.train`, together with `ranks`; `kept` are another process's `LoadedSource.kept`.

    Raises UserError for none or an invalid file.
    """
    check_train(data)
    template = PromptTemplate.of(tokenizer, data, vision)
    readings = [Reading(source, responses=responses, pairs=pairs, vision=vision) for source in data.training_sources]
    places = kept if kept is not None else [None] * len(readings)
    return [load_source(reading, data, template, place, ranks) for reading, place in zip(readings, places, strict=True)]


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
) -> LoadedSource:
    """Read, tokenise and filter one source, alone or together with `ranks`, or map another process's table of it.

    If the table is incomplete, one process writes it and the others wait. `kept` is another process's
    `LoadedSource.kept` of it; if this machine does not have that folder, the source is read into it. Raises UserError
    if the file is invalid, or no prompt is short enough.
    """
    if kept is None and ranks is not None and ranks.size > 1:
        return load_together(reading, data, template, ranks)
    # Imported here: it takes a second.
    import datasets
    from datasets.exceptions import DatasetGenerationError

    given = 2 if reading.pairs else int(reading.responses)
    folder, examples = new_folder(reading, data, template) if kept is None else (Path(kept), iter(reading))
    if (folder / PARTS).is_file():
        return mapped_parts(reading.source, folder)
    ids, mask = datasets.List(datasets.Value("int32")), datasets.List(datasets.Value("bool"))
    types = {"example": datasets.Value("large_string"), "prompt": ids}
    types |= {"images": datasets.Value("large_string")} if template.vision else {}
    for name in RESPONSES[:given]:
        types |= {name: ids, f"{name}_trained": mask}

    def rows() -> Iterator[dict[str, Any]]:
        facts = Facts()
        batches = iter(lambda: list(islice(examples, BATCH)), [])
        shown = with_progress(batches, f"Tokenising {reading.source.label}")
        for batch in rows_of(reading, shown, template, data.max_prompt_tokens, given, facts):
            yield from batch
        check_kept(reading, data, facts)
        (folder / "facts.json").write_text(json.dumps(asdict(facts)), encoding="utf-8")

    # The process that created the folder of a temporary table removes it after use.
    mine = folder.name.startswith(PASSING) and not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with quiet():
            dataset = datasets.Dataset.from_generator(
                rows, features=datasets.Features(types), cache_dir=str(folder), fingerprint="examples"
            )
    except (DatasetGenerationError, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        if full := no_room(error):
            key = "TMPDIR" if mine else "data.cache"
            raise UserError(
                f"{folder.parent}: the tokenised data of {reading.source.path} cannot be written: {full}, or set "
                f"{key} to another folder"
            ) from error
        raise error.__cause__ or error from None
    facts = Facts(**json.loads((folder / "facts.json").read_text(encoding="utf-8")))
    table = LoadedSource(reading.source, dataset.data, facts, folder)
    if mine:
        # `weakref.finalize` does not run at the end of a process that multiprocessing has started.
        Finalize(table, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)
    return table


def load_together(reading: Reading, data: DataConfig, template: PromptTemplate, ranks: LoadingRanks) -> LoadedSource:
    """Load one source with other ranks: each tokenises its share of the batches.

    Raises UserError in all ranks, for the first invalid example of the file.
    """
    purpose, temporary = f"data {reading.source.label}", Path(tempfile.gettempdir())
    started: tuple[Path, Iterator[Example]] | None = None
    named: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            started = new_folder(reading, data, template)
            named = {"name": started[0].name, "temporary": started[0].parent == temporary}
        except UserError as error:
            named = {"refused": str(error)}
    named = ranks.gather(purpose, named)[0]
    if "refused" in named:
        raise UserError(named["refused"])
    folder = (temporary if named["temporary"] else data.cache.expanduser()) / named["name"]
    if all(ranks.gather(f"{purpose}: kept", (folder / "facts.json").is_file())):
        return load_source(reading, data, template, str(folder))
    mine = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        outcome = write_part(reading, started[1] if started else iter(reading), template, data, ranks, folder)
    except UserError as error:
        outcome = {"refused": str(error), "batch": sys.maxsize}
    outcomes = ranks.gather(f"{purpose}: parts", outcome)
    refused = [one for one in outcomes if "refused" in one]
    if not refused:
        facts = Facts.of_parts([one["facts"] for one in outcomes if one])
        try:
            check_kept(reading, data, facts)
        except UserError as error:
            refused = [{"refused": str(error), "batch": 0}]
    if refused:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(min(refused, key=lambda one: one["batch"])["refused"])
    exchange_parts(folder, ranks, purpose)
    layout = {"parts": len(part_writers(ranks.size)), "batches": outcomes[0]["batches"]}
    for name, value in (("facts.json", asdict(facts)), (PARTS, layout)):
        # Ranks of one machine write the same file.
        own_part = folder / f"{name}.{ranks.rank}"
        own_part.write_text(json.dumps(value), encoding="utf-8")
        own_part.replace(folder / name)
    table = mapped_parts(reading.source, folder)
    if mine and named["temporary"]:
        Finalize(table, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)
    return table


def part_writers(size: int) -> list[int]:
    """Return the ranks that write the parts of a table, spread over all."""
    parts = min(size, MOST_PARTS)
    return [number * size // parts for number in range(parts)]


def part_of(folder: Path, number: int, parts: int) -> Path:
    return folder / f"part-{number}-of-{parts}.arrow"


def write_part(
    reading: Reading,
    examples: Iterator[Example],
    template: PromptTemplate,
    data: DataConfig,
    ranks: LoadingRanks,
    folder: Path,
) -> dict[str, Any]:
    """Write a rank's batches of a source, and return the statistics and the number of all batches; or the refusal of an
    invalid example, with its batch. A rank that writes none returns nothing.
    """
    import pyarrow

    writers = part_writers(ranks.size)
    if ranks.rank not in writers:
        return {}
    part, parts = writers.index(ranks.rank), len(writers)
    given = 2 if reading.pairs else int(reading.responses)
    ids, mask = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.bool_())
    types = [("example", pyarrow.large_string()), ("prompt", ids)]
    for name in RESPONSES[:given]:
        types += [(name, ids), (f"{name}_trained", mask)]
    types += [("images", pyarrow.large_string())] if template.vision else []
    schema, facts, seen = pyarrow.schema(types), Facts(), [0]

    def own_batches() -> Iterator[list[Example]]:
        # The lines of other ranks are not parsed if each is one example.
        lines = reading.lines() if reading.is_plain else None
        for number in count():
            most = SHARED_BATCH if number < SMALL_BATCHES * parts else BATCH
            batch: list[Any] = list(islice(examples if lines is None else lines, most))
            if not batch:
                return
            seen[0] = number + 1
            if number % parts == part:
                yield batch if lines is None else [reading.example_of(*line) for line in batch]

    shown = with_progress(own_batches(), f"Tokenising {reading.source.label}") if ranks.rank == 0 else own_batches()
    target = part_of(folder, part, parts)
    unfinished = target.with_suffix(".unfinished")
    try:
        with pyarrow.OSFile(str(unfinished), "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
            for rows in rows_of(reading, shown, template, data.max_prompt_tokens, given, facts):
                writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema))
    except UserError as error:
        return {"refused": str(error), "batch": seen[0]}
    except OSError as error:
        if full := no_room(error):
            return {"refused": f"{folder}: the tokenised data cannot be written: {full}", "batch": sys.maxsize}
        raise
    unfinished.replace(target)
    return {"facts": asdict(facts), "batches": seen[0]}


def exchange_parts(folder: Path, ranks: LoadingRanks, purpose: str) -> None:
    """Bring to each machine the parts that its folder lacks, in rounds of bounded bytes; none where all share a folder.

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
    wanted = [rank for rank, (_, parts) in enumerate(needs) if receives[rank] and mine in parts]
    senders = {writers[number]: files[number].with_suffix(".unfinished") for number in lacking if receives[ranks.rank]}
    size = files[mine].stat().st_size if mine is not None else 0
    rounds = max(ranks.gather(f"{purpose}: sizes", -(-size // EXCHANGED_BYTES)))
    with files[mine].open("rb") if mine is not None else io.BytesIO() as file:
        for number in range(rounds):
            piece = file.read(EXCHANGED_BYTES)
            for sender, part in ranks.exchange(purpose, dict.fromkeys(wanted, piece), senders).items():
                with senders[sender].open("wb" if not number else "ab") as target:
                    target.write(part)
    for sender, unfinished in senders.items():
        unfinished.replace(files[writers.index(sender)])
    ranks.gather(f"{purpose}: received", None)


def machine_of(folder: Path) -> str:
    """Return a name of the folder that differs between machines which do not share it."""
    return f"{platform.node()}:{folder}:{folder.stat().st_dev}:{folder.stat().st_ino}"


def mapped_parts(source: SourceConfig, folder: Path) -> LoadedSource:
    """Map a table of several parts, with its batches in the order of the file."""
    import pyarrow

    layout = json.loads((folder / PARTS).read_text(encoding="utf-8"))
    size = layout["parts"]
    files = [pyarrow.ipc.open_file(pyarrow.memory_map(str(part_of(folder, rank, size)))) for rank in range(size)]
    batches = [files[number % size].get_batch(number // size) for number in range(layout["batches"])]
    table = pyarrow.Table.from_batches([batch for batch in batches if batch.num_rows], files[0].schema)
    facts = Facts(**json.loads((folder / "facts.json").read_text(encoding="utf-8")))
    return LoadedSource(source, table, facts, folder)


def check_kept(reading: Reading, data: DataConfig, facts: Facts) -> None:
    """Raise UserError if no prompt of a source is short enough."""
    if not facts.longest_prompt:
        raise UserError(
            f"{reading.source.path}: all {facts.read} prompts are longer than "
            f"data.max_prompt_tokens={data.max_prompt_tokens}; the shortest has {facts.shortest} tokens"
        )


def new_folder(reading: Reading, data: DataConfig, template: PromptTemplate) -> tuple[Path, Iterator[Example]]:
    """Return the folder of a source's table, and the examples to write to it.

    A large source has a folder in the cache; its name depends on files, settings, code and tokenizer. The folder is
    temporary for a small source, and for unknown code: a conversion without a version, or a tokenizer with its own
    code.
    """
    source, tokenizer, examples = reading.source, template.tokenizer, iter(reading)
    own_conversion = source.convert is not None and source.convert not in CONVERSIONS
    own_tokenizer = not tokenizer.is_fast or not type(tokenizer).__module__.startswith("transformers.")
    if not own_tokenizer and (source.convert_version is not None or not own_conversion):
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
        started = [] if folder.is_dir() else list(islice(examples, data.in_memory + 1))
        examples = chain(started, examples)
        if folder.is_dir() or len(started) > data.in_memory:
            return folder, examples
    prefix, temporary = f"{PASSING}{platform.node()}-", Path(tempfile.gettempdir())
    for earlier in temporary.glob(f"{glob.escape(prefix)}*"):
        # Folders of processes that were killed are removed.
        process = earlier.name.removeprefix(prefix).partition("-")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            shutil.rmtree(earlier, ignore_errors=True)
    return temporary / f"{prefix}{os.getpid()}-{uuid.uuid4().hex}", examples


def unread_by(template: PromptTemplate, example: Example, seen: set[tuple[str, str]]) -> Iterator[str]:
    """Yield what the chat template does not read of an example: tools, arguments and fields of messages.

    Each field is tried once; `seen` has those that were.
    """
    if example.tools and ("", "tools") not in seen:
        seen.add(("", "tools"))
        if not template.shows_tools:
            yield UNREAD_TOOLS
    for name in template.unread_arguments if ("", ",".join(template.arguments)) not in seen else ():
        yield f"the chat template does not read the argument {name!r}"
    seen.add(("", ",".join(template.arguments)))
    for part in (example.prompt, example.response, example.rejected):
        for message in part if isinstance(part, list) else ():
            for name in message.keys() - READ:
                if (message["role"], name) not in seen:
                    seen.add((message["role"], name))
                    if template.unread(message["role"], name, message[name]):
                        yield f"the chat template does not read {name!r} of {message['role']} messages"


def special_in(example: Example, special: re.Pattern[str]) -> Iterator[str]:
    """Yield a note for the text of a special token within a message: the tokenizer makes the token of it."""
    for part in (example.prompt, example.response, example.rejected):
        for message in part if isinstance(part, list) else ():
            content = message.get("content")
            if isinstance(content, str) and (match := special.search(content)):
                yield f"the text of a {message['role']} message has {match[0]!r}, which becomes that special token"


def rows_of(
    reading: Reading,
    batches: Iterable[list[Example]],
    template: PromptTemplate,
    limit: int,
    given: int,
    facts: Facts,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each batch of examples, and fill in the facts. Raises UserError for an invalid example."""
    path, seen = reading.source.path, set[tuple[str, str]]()
    special = special_text(template.tokenizer) if template.is_chat else None
    for batch in batches:
        rows = []
        facts.read += len(batch)
        texts = []
        for example in batch:
            with located(place(path, example.line)):
                row_template = template.with_arguments(example.arguments)
                texts.append(row_template.render(example.prompt, example.tools))
                notes = [
                    *unread_by(row_template, example, seen),
                    *(special_in(example, special) if special else ()),
                ]
                for note in notes:
                    facts.notes.setdefault(note, example.line)
        prompts = template.encode_texts(texts, begins=not template.is_chat)
        spans = list[list[ImageSpan]]()
        for number, example in enumerate(batch):
            with located(place(path, example.line)):
                prompts[number], seen_in_prompt = template.expand(prompts[number], names_in(example.prompt))
                spans.append(seen_in_prompt)
        for example, ids in zip(batch, prompts, strict=True):
            if not ids:
                where = place(path, example.line)
                raise UserError(f"{where}: the tokenizer makes no token of this prompt; write some text")
        facts.shortest = min(facts.shortest or len(prompts[0]), *map(len, prompts), len(prompts[0]))
        for example, text, ids, images in zip(batch, texts, prompts, spans, strict=True):
            if len(ids) > limit:
                continue
            with located(place(path, example.line)):
                answers = [answer for answer in (example.response, example.rejected)[:given] if answer is not None]
                begin, responses = template.encode_given(example, answers, text)
                if begin != text:
                    (ids,) = template.encode_texts([begin], begins=not template.is_chat)
                    ids, images = template.expand(ids, names_in(example.prompt))
            row = {"example": json.dumps(astuple(example), separators=(",", ":")), "prompt": ids}
            if template.vision:
                of_row = [images, *(response.images for response in responses)]
                row["images"] = json.dumps(of_row)
                count = str(sum(map(len, of_row)))
                facts.images[count] = facts.images.get(count, 0) + 1
            for name, response in zip(RESPONSES, responses, strict=False):
                row |= {name: response.ids, f"{name}_trained": response.trained}
                facts.longest_row = max(facts.longest_row, len(ids) + len(response.ids))
            facts.longest_prompt = max(facts.longest_prompt, len(ids))
            if example.answer is None and facts.unanswered is None:
                facts.unanswered, facts.unanswered_fields = example.line, list(example.metadata)
            rows.append(row)
        yield rows
    facts.left_out, facts.without_form = dict(reading.left_out), reading.without_form
    facts.notes = {**reading.notes, **facts.notes}
