"""The table of a source: examples are rendered and tokenised in batches, and each rank writes its part.

    rank 0: batches 0, 2, ... ──▶ folder/part-0-of-2.arrow
    rank 1: batches 1, 3, ... ──▶ folder/part-1-of-2.arrow

Where each line of the file is an example, a rank reads only the lines of its batches.
"""

import json
import operator
import re
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from braidrl.config import DataConfig
from braidrl.data.chat import READ, UNREAD_TOOLS, special_text, special_tokens
from braidrl.data.images import names_in
from braidrl.data.lines import Lines
from braidrl.data.records import place
from braidrl.data.sources import Example, Reading
from braidrl.data.templates import Given, PromptTemplate
from braidrl.data.vision import ImageSpan
from braidrl.errors import UserError, located, no_room, printable

RESPONSES = ("response", "rejected")
BATCH, SHARED_BATCH, SMALL_BATCHES = 512, 64, 8
"""Examples that are tokenised in one call, and fewer in each rank's first batches, so that small sources have a batch
for each.
"""
MOST_PARTS = 64
"""Parts of a table: each rank opens all of them."""
PROGRESS_AFTER_S = 1.5


@dataclass
class Facts:
    """Statistics of a source, collected in one pass over its examples."""

    read: int = 0
    """Number of examples, including too long ones."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of skipped records by reason."""
    without_form: list[str] = field(default_factory=list)
    """Columns without a JSON form, which are omitted."""
    longest_prompt: int = 0
    longest_row: int = 0
    """Tokens of the longest prompt, and of the longest prompt with a response of the data (0 without responses)."""
    shortest: int = 0
    """Tokens of the shortest prompt, including dropped prompts."""
    unanswered: int | None = None
    """Line of the first example without an answer, if any."""
    unanswered_fields: list[str] = field(default_factory=list)
    """Other fields of that example."""
    images: dict[str, int] = field(default_factory=dict)
    """Number of examples by their number of images, for a multimodal model."""
    notes: dict[str, int] = field(default_factory=dict)
    """Unused parts of examples, each with the first line that has it."""
    unread: dict[str, int] = field(default_factory=dict)
    """Columns that are not part of the prompt, each with its first line."""

    @staticmethod
    def of_parts(parts: Sequence[Mapping[str, Any]]) -> "Facts":
        """Return the statistics of a source from those of its parts."""
        facts_of_parts = [Facts(**part) for part in parts]
        images = sum((Counter(facts.images) for facts in facts_of_parts), Counter[str]())
        unanswered = min(
            (facts for facts in facts_of_parts if facts.unanswered is not None),
            key=lambda facts: facts.unanswered or 0,
            default=None,
        )
        return Facts(
            read=sum(facts.read for facts in facts_of_parts),
            left_out=facts_of_parts[0].left_out,
            without_form=facts_of_parts[0].without_form,
            longest_prompt=max(facts.longest_prompt for facts in facts_of_parts),
            longest_row=max(facts.longest_row for facts in facts_of_parts),
            shortest=min((facts.shortest for facts in facts_of_parts if facts.shortest), default=0),
            unanswered=unanswered.unanswered if unanswered else None,
            unanswered_fields=unanswered.unanswered_fields if unanswered else [],
            notes=first_lines([facts.notes for facts in facts_of_parts]),
            unread=first_lines([facts.unread for facts in facts_of_parts]),
            images=dict(images),
        )


def first_lines(mappings: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the least line of each key of several mappings."""
    return {key: min(lines.get(key, sys.maxsize) for lines in mappings) for mapping in mappings for key in mapping}


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
        """Send bytes to some ranks; return the bytes from each of `senders`."""


class SingleProcess:
    """A single process that loads data."""

    rank, size = 0, 1

    def gather(self, purpose: str, value: Any) -> list[Any]:
        return [value]

    def exchange(
        self, purpose: str, messages: Mapping[int, bytes | bytearray], senders: Collection[int]
    ) -> Mapping[int, memoryview]:
        return {}


@contextmanager
def shown(title: str, total: int | None = None, after_s: float = PROGRESS_AFTER_S) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr once the block has taken `after_s` seconds; a log file or a pipe gets a line.

    The block calls the yielded function with the number done so far.
    """
    progress, title = Progress(console=Console(stderr=True)), printable(title)
    task = progress.add_task(escape(title), total=total)

    def show() -> None:
        if not progress.console.is_terminal:
            progress.console.print(f"{title} ...", markup=False, soft_wrap=True)
        progress.start()

    # A separate thread: the first batch may take longer.
    timer = threading.Timer(after_s, show)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done: progress.update(task, completed=done)
    finally:
        timer.cancel()
        # An abandoned generator may end in any thread, also in the timer's.
        if threading.current_thread() is not timer:
            timer.join()
        if progress.live.is_started:
            progress.stop()


def with_progress(
    batches: Iterable[list[Any]], title: str, after_s: float = PROGRESS_AFTER_S, total: int | None = None
) -> Iterator[list[Any]]:
    """Yield the same batches, with their progress."""
    done = 0
    with shown(title, total, after_s) as update:
        for batch in batches:
            yield batch
            done += len(batch)
            update(done)


def part_writers(size: int) -> list[int]:
    """Return the ranks that write the parts of a table, spread over all."""
    parts = min(size, MOST_PARTS)
    return [number * size // parts for number in range(parts)]


def part_of(folder: Path, number: int, parts: int) -> Path:
    return folder / f"part-{number}-of-{parts}.arrow"


@dataclass
class OwnBatches:
    """The batches of a source that one rank tokenises: every n-th one.

    `seen` counts the batches of all ranks that were read so far.
    """

    reading: Reading
    part: int
    parts: int
    examples: Iterator[Example] | None = None
    lines: Lines | None = None
    """The index of a file whose lines are examples: those of other ranks are not read."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set to read no further batch."""
    seen: int = 0

    def __iter__(self) -> Iterator[list[Example]]:
        """Yield the examples of this rank's batches."""
        for number in count():
            if self.lines is not None:
                start, stop = self.bounds(number)
                if start >= len(self.lines):
                    return
                self.seen = number + 1
                if number % self.parts == self.part:
                    yield [self.reading.example_of(*line) for line in self.lines.at(range(start, stop))]
            else:
                assert self.examples is not None
                start, stop = self.bounds(number)
                batch = list(islice(self.examples, stop - start))
                if not batch:
                    return
                self.seen = number + 1
                if number % self.parts == self.part:
                    yield batch
            if self.stopped.is_set():
                return

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the positions of a batch's first example and of the one behind its last."""
        small = min(number, SMALL_BATCHES * self.parts)
        start = small * SHARED_BATCH + (number - small) * BATCH
        stop = start + (SHARED_BATCH if number < SMALL_BATCHES * self.parts else BATCH)
        return start, stop if self.lines is None else min(stop, len(self.lines))


def own_batches_of(
    reading: Reading, ranks: LoadingRanks, examples: Iterator[Example] | None, lines: Lines | None
) -> OwnBatches | None:
    """Return the batches that this rank writes; None if it writes none."""
    writers = part_writers(ranks.size)
    if ranks.rank not in writers:
        return None
    return OwnBatches(reading, writers.index(ranks.rank), len(writers), examples, lines)


def write_part(
    share: OwnBatches | None, template: PromptTemplate, data: DataConfig, folder: Path, shows: bool = False
) -> dict[str, Any]:
    """Write a rank's batches of a source, and return the statistics and the number of all batches; or the refusal of an
    invalid example, with its batch. A rank that writes none returns nothing.
    """
    import pyarrow

    if share is None:
        return {}
    reading, facts = share.reading, Facts()
    responses = 2 if reading.pairs else int(reading.responses)
    ids, mask = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.bool_())
    types = [("example", pyarrow.large_string()), ("prompt", ids)]
    for name in RESPONSES[:responses]:
        types += [(name, ids), (f"{name}_trained", mask)]
    types += [("images", pyarrow.large_string())] if template.vision else []
    schema = pyarrow.schema(types)
    total = None if share.lines is None else len(share.lines) // share.parts
    batches = with_progress(share, f"Tokenising {reading.source.label}", total=total) if shows else iter(share)
    target = part_of(folder, share.part, share.parts)
    # Another run may write the same part of a kept table.
    unfinished = target.with_suffix(f".{uuid.uuid4().hex}.unfinished")
    try:
        # A file of Python's: its errors name the fault alone.
        with unfinished.open("wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
            for rows in rows_of(reading, batches, template, data.max_prompt_tokens, responses, facts):
                writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema))
        if share.stopped.is_set():
            return {}
        unfinished.replace(target)
    except UserError as error:
        return {"refused": str(error), "batch": share.seen}
    except OSError as error:
        if full := no_room(error):
            key = "data.cache" if folder.parent == data.cache.expanduser() else "TMPDIR"
            lacks = f"the tokenised data of {reading.source.path} cannot be written: {full}"
            return {"refused": f"{folder.parent}: {lacks}, or set {key} to another folder", "batch": sys.maxsize}
        raise
    finally:
        unfinished.unlink(missing_ok=True)
    return {"facts": asdict(facts), "batches": share.seen}


VALUES = operator.attrgetter(*(each.name for each in fields(Example)))


def unread_by(template: PromptTemplate, example: Example, tried: set[tuple[str, str]]) -> Iterator[str]:
    """Yield what the chat template does not read of an example: tools, arguments and fields of messages.

    Each field is tried once, and then is in `tried`.
    """
    if example.tools and ("", "tools") not in tried:
        tried.add(("", "tools"))
        if not template.shows_tools:
            yield UNREAD_TOOLS
    for name in template.unread_arguments if ("", ",".join(template.arguments)) not in tried else ():
        yield f"the chat template does not read the argument {name!r}"
    tried.add(("", ",".join(template.arguments)))
    for part in (example.prompt, example.response, example.rejected):
        for message in part if isinstance(part, list) else ():
            # Templates write the name of a tool; that of a speaker is read by few.
            for name in message.keys() - (READ if message["role"] == "tool" else READ - {"name"}):
                if (message["role"], name) not in tried:
                    tried.add((message["role"], name))
                    if template.unread(message["role"], name, message[name]):
                        yield f"the chat template does not read {name!r} of {message['role']} messages"


def unwritten(messages: Any, text: str) -> Iterator[str]:
    """Yield a note for each message whose content a rendered text lacks, such as of a role unknown to the template."""
    bare = "".join(text.split())
    for message in messages if isinstance(messages, list) else ():
        content, is_answer = message.get("content"), message["role"] == "assistant"
        if not isinstance(content, str) or not content.strip():
            continue
        # Templates remove the reasoning of earlier answers, and write what tools say as JSON.
        said = content.rpartition("</think>")[2] if is_answer else content
        forms = (said, json.dumps(said)[1:-1], json.dumps(said, ensure_ascii=False)[1:-1])
        if not any("".join(form.split()) in bare for form in forms):
            yield f"the chat template does not write the content of a message of the role {message['role']!r}"


def has_open_turn(response: Given, ends: Collection[int]) -> bool:
    """Return True if a trained turn before the last one does not end with one of the tokens `ends`."""
    steps = zip(response.ids, response.trained, response.trained[1:], strict=False)
    return any(trained and not following and token not in ends for token, trained, following in steps)


def special_in(example: Example, special: re.Pattern[str]) -> Iterator[str]:
    """Yield a note for each message whose text contains a special token's text: the tokenizer reads that token."""
    for part in (example.prompt, example.response, example.rejected):
        for message in part if isinstance(part, list) else ():
            content = message.get("content")
            if isinstance(content, str) and (match := special.search(content)):
                where = f"the text of a message of the role {message['role']!r}"
                yield f"{where} has {match[0]!r}, which becomes that special token"


def rows_of(
    reading: Reading,
    batches: Iterable[list[Example]],
    template: PromptTemplate,
    limit: int,
    responses_kept: int,
    facts: Facts,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each batch of examples, and fill in the facts. Raises UserError for an invalid example."""
    path, tried = reading.source.path, set[tuple[str, str]]()
    special = special_text(template.tokenizer) if template.is_chat else None
    ends = special_tokens(template.tokenizer) if template.is_chat else {}
    for batch in batches:
        rows = []
        facts.read += len(batch)
        texts = []
        for example in batch:
            with located(place(path, example.line)):
                row_template = template.with_arguments(example.arguments)
                texts.append(row_template.render(example.prompt, example.tools))
                notes = [
                    *unread_by(row_template, example, tried),
                    *(special_in(example, special) if special else ()),
                    *(unwritten(example.prompt, texts[-1]) if template.is_chat else ()),
                ]
                for note in notes:
                    facts.notes.setdefault(note, example.line)
        prompts = template.encode_texts(texts, begins=not template.is_chat)
        spans = list[list[ImageSpan]]() if template.vision else [[]] * len(batch)
        for number, example in enumerate(batch if template.vision else ()):
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
            answers = [answer for answer in (example.response, example.rejected)[:responses_kept] if answer is not None]
            responses = list[Given]()
            with located(place(path, example.line)) if answers else nullcontext():
                begin, responses = template.encode_given(example, answers, text) if answers else (text, [])
                if begin != text:
                    (ids,) = template.encode_texts([begin], begins=not template.is_chat)
                    ids, images = template.expand(ids, names_in(example.prompt))
            for answer, response in zip(answers, responses, strict=True) if template.is_chat else ():
                if isinstance(answer, list) and has_open_turn(response, ends):
                    facts.notes.setdefault(
                        "the chat template ends an earlier answer without a special token, so that no end of it is "
                        "trained; `train_on: last` trains last answers alone",
                        example.line,
                    )
                between = [m for m in answer if m["role"] != "assistant"] if isinstance(answer, list) else []
                for note in unwritten(between, template.tokenizer.decode(response.ids) if between else ""):
                    facts.notes.setdefault(note, example.line)
            row = {"example": json.dumps(VALUES(example), separators=(",", ":")), "prompt": ids}
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
    facts.notes, facts.unread = {**reading.notes, **facts.notes}, reading.unread
