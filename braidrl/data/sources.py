"""Conversion of records to examples: one `Example` per line or row, errors with their location, counts of skipped
records by reason.

records ──where──▶ ──convert──▶ JSON values ──unique──▶ ──skip, first──▶ examples

field of a record                             part of the example
`prompt_field`                                prompt      text, or chat messages {role, content}
`answer_field`, or reward_model.ground_truth  answer      what a verifier compares with
`tools_field`, `template_field`               tools, arguments of the chat template
`response_field`, completion, messages        response    to train on, text or messages; only if the flow needs it
`chosen_field` and `rejected_field`           response and rejected, likewise
`system` or `system_prompt`                   the prompt's first message, unless it already has one
all but the responses, under their own names  metadata    JSON values, kept as they are
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from braidrl.config import SourceConfig
from braidrl.config.paths import check_source
from braidrl.data.chat import TRAINED, template_arguments, tools_of
from braidrl.data.conversations import ROLES, Prompt, Response, is_answer, messages_in
from braidrl.data.conversions import CONVERSIONS, UNIQUE
from braidrl.data.fields import (
    ABSENT,
    COMPLETION,
    CONVERSATIONS,
    SYSTEM,
    LeftOut,
    find,
    find_required,
    given_response,
    pair_of,
    prompt_of,
    with_system,
)
from braidrl.data.images import (
    IMAGE,
    MARK,
    OTHER_MEDIA,
    BrokenImage,
    NotFetched,
    has_marks,
    image_parts,
    kept_messages,
    names_in,
    with_images,
)
from braidrl.data.lines import LINE_BYTES
from braidrl.data.records import (
    NO_FORM,
    Record,
    as_json,
    kind_of,
    object_of,
    parsed,
    place,
    read_arrow,
    read_objects,
    whole_text,
)
from braidrl.data.vision import Vision
from braidrl.errors import UserError, located

# verl's files keep the reference answer here.
GROUND_TRUTH = "reward_model.ground_truth"
TEMPLATED = ("prompt_field", "tools_field", "template_field", "response_field", "chosen_field", "rejected_field")
"""Fields of a record that only chat templates see."""


@dataclass(frozen=True, slots=True)
class Example:
    """One line of a data file; `line` counts from 1."""

    prompt: Prompt
    answer: Any
    response: Response | None
    metadata: dict[str, Any]
    line: int
    rejected: Response | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    """Chat template arguments of this example, in addition to the run's."""


class Reading:
    """One pass over a source, which yields its examples in order.

    Afterwards `left_out` has the number of skipped records by reason, `without_form` the columns without a JSON form,
    `unread` the columns that are not part of the prompt, and `notes` the ignored parts of records, with the first line
    of each.
    """

    def __init__(
        self,
        source: SourceConfig,
        *,
        responses: bool = False,
        pairs: bool = False,
        usual_split: str = "train",
        vision: Vision | None = None,
    ) -> None:
        """Start before the first record; examples need a response for `responses`, two for `pairs`.

        Images are read with a `vision`. Raises UserError without a file.
        """
        check_source(source)
        self.vision = vision
        self.source, self.responses, self.pairs, self.usual_split = source, responses, pairs, usual_split
        self._is_arrow = source.path.is_dir() or source.path.suffix == ".parquet"
        """Whether records come from Arrow batches, where each nested record has the keys of all records, as nulls."""
        templated = {getattr(source, key).partition(".")[0] for key in TEMPLATED} | {COMPLETION, *CONVERSATIONS}
        self._templated = templated
        """Fields for templates: nulls of Arrow's are removed. Verifiers get their fields unchanged."""
        defaults = {key: field.default for key, field in SourceConfig.model_fields.items()}
        # A resolved configuration sets every field, so `model_fields_set` is no help.
        self._named = {key for key, default in defaults.items() if getattr(source, key) != default}
        """The settings with another value than the default: a field of the data that these name must exist."""
        self._convert = (lambda record: record) if source.convert is None else CONVERSIONS.find(source.convert)
        self.left_out: Counter[str] = Counter()
        self.without_form: list[str] = []
        self.notes: dict[str, int] = {}
        self.unread: dict[str, int] = {}
        answers = {source.answer_field.partition(".")[0], GROUND_TRUTH.partition(".")[0]}
        form_columns = {
            getattr(source, name).partition(".")[0] for name in ("prompt_field", "tools_field", "template_field")
        }
        self._read_columns = answers | form_columns
        with located(f"`template` of the source {source.path}"):
            template_arguments(source.template)
        self._digests: set[bytes] = set()

    def __iter__(self) -> Iterator[Example]:
        """Yield the examples.

        Raises UserError, with file and line or row, for an invalid record, and for a source without examples.
        """
        source, number = self.source, 0
        end = None if source.first is None else source.skip + source.first
        for line, record in self._records():
            if number == end:
                return
            try:
                example = self._chosen(record, line)
            except LeftOut as reason:
                self.left_out[str(reason)] += 1
                continue
            number += 1
            if number > source.skip:
                yield example
        if number <= source.skip:
            raise self.no_examples

    def first_example(self) -> Example | None:
        """Return the example of the first record; None if it is left out. Raises UserError as the iteration does."""
        for line, record in self._records():
            try:
                return self._chosen(record, line)
            except LeftOut:
                return None
        raise self.no_examples

    def _records(self) -> Iterator[tuple[int, Record]]:
        if self._is_arrow:
            return read_arrow(self.source, self.usual_split)
        return read_objects(self.source.path, may_be_list=self.source.path.suffix == ".json")

    @property
    def no_examples(self) -> UserError:
        """Return the error for a source without examples."""
        source = self.source
        skipped = [f"{count} left out because {reason}" for reason, count in self.left_out.items()]
        skipped += [f"the first {source.skip} are skipped"] if source.skip else []
        about = f" ({', '.join(skipped)})" if skipped else ""
        return UserError(f"{source.path} has no examples{about}; write one JSON object or row for each prompt")

    @property
    def is_plain(self) -> bool:
        """Return True if each line of the file is one example, so that lines of other ranks need not be parsed."""
        source = self.source
        chosen = source.where or source.convert or source.unique or source.skip or source.first is not None
        answers = self.responses or self.pairs or self.vision is not None
        return source.path.suffix == ".jsonl" and not chosen and not answers

    def example_of(self, line: int, text: bytes) -> Example:
        """Return the example of a line of a plain source. Raises UserError for an invalid one."""
        path = self.source.path
        return self._chosen(object_of(path, line, parsed(place(path, line), text, LINE_BYTES)), line)

    def _chosen(self, record: Record, line: int) -> Example:
        for name, allowed in self.source.where.items():
            if find(record, name) not in (allowed if isinstance(allowed, list) else [allowed]):
                raise LeftOut(f"{name} is another than `where` says")
        try:
            converted = self._convert(record)
        except Exception as error:
            conversion = f"{place(self.source.path, line)}: data conversion {self.source.convert}"
            raise UserError(
                f"{conversion} raised {type(error).__name__}: {error}; return the example, or a text that says why "
                "it is left out"
            ) from error
        if isinstance(converted, str):
            raise LeftOut(converted)
        if not isinstance(converted, dict):
            conversion = f"{place(self.source.path, line)}: data conversion {self.source.convert}"
            raise UserError(
                f"{conversion} returned {kind_of(converted)}; return a dict, or a text that says why the record is "
                "left out"
            )
        try:
            example = self._read(converted, line)
        except BrokenImage as error:
            if self.vision is not None and self.vision.skips_broken:
                raise LeftOut("an image of it is broken") from None
            fetch = "data.images.fetch=true to fetch it, or " if isinstance(error, NotFetched) else ""
            raise UserError(
                f"{place(self.source.path, line)}: {error}; or write {fetch}data.images.broken=skip to leave such "
                "records out"
            ) from None
        if self.source.unique or self.source.convert in UNIQUE:
            digest = hashlib.blake2b(json.dumps(example.prompt).encode(), digest_size=16).digest()
            if digest in self._digests:
                raise LeftOut("the prompt was there before")
            self._digests.add(digest)
        return example

    def _read(self, converted: Record, line: int) -> Example:
        """Return the example of a converted record. Raises BrokenImage, and as `_example`."""
        converted, images = self._with_kept_images(converted)
        values: Record = {}
        for key, raw in converted.items():
            name, value = whole_text(str(key)), as_json(raw)
            if value is not NO_FORM:
                values[name] = self._for_templates(name, value, line) if name in self._templated else value
            elif name not in self.without_form:
                self.without_form.append(name)
        example = self._example(values, line)
        has_parts = any(image_parts(part) for part in (example.prompt, example.response, example.rejected))
        if images or has_parts or (self.vision is not None and has_marks(example.prompt)):
            return self._with_images(example, images, line)
        return example

    def _conversation(self, record: Record) -> list[Any]:
        """Return the messages before a pair of answers, where the data have them beside the pair; else nothing."""
        pair = (record.get(field) for field in (self.source.chosen_field, self.source.rejected_field))
        answers = [answer[0] if isinstance(answer, list) and answer else answer for answer in pair]
        is_beside = all(isinstance(answer, str) or is_answer(answer) for answer in answers)
        given = (record.get(name) for name in CONVERSATIONS if is_beside)
        return next((messages for messages in given if isinstance(messages, list) and messages), [])

    def _for_templates(self, name: str, value: Any, line: int) -> Any:
        """Prepare a field's value for templates: drop Arrow's nulls, and parse messages given as JSON."""
        if isinstance(value, str) and (messages := messages_in(value)):
            self.notes.setdefault(f"{name!r} is the JSON of messages, and is read as messages", line)
            return messages
        return without_nulls(value) if self._is_arrow else value

    def _with_kept_images(self, record: Record) -> tuple[Record, list[str]]:
        """Return a record whose images are names in the store, and the names in the image field. Raises BrokenImage."""
        if self.vision is None:
            return record, []
        images, beside, field = self.vision.store, self.source.path.parent, self._image_field(record)
        for name in OTHER_MEDIA:
            if record.get(name):
                raise BrokenImage(f"the field {name!r} is given, and videos and sounds are not supported; remove it")
        values = record.get(field)
        values = [values] if values is not None and not isinstance(values, list | tuple) else values or []
        names = [images.add(image, beside) for image in values]
        stored = {name: kept_messages(value, images, beside) for name, value in record.items() if name != field}
        return ({**stored, field: names} if names else stored), names

    def _image_field(self, record: Record) -> str:
        """Return the field with a record's images."""
        field = self.source.images_field
        return field if record.get(field) is not None or "images_field" in self._named else IMAGE

    def _with_images(self, example: Example, images: list[str], line: int) -> Example:
        """Return the example with a record's images at their marks. Raises BrokenImage for another number of marks."""
        prompt_given = example.prompt
        prompt = [{"role": "user", "content": prompt_given}] if isinstance(prompt_given, str) else prompt_given
        response = example.response if isinstance(example.response, list) else []
        messages, vision = with_images([*prompt, *response], images), self.vision
        assert vision is not None
        for name in dict.fromkeys(names_in(messages)):
            vision.expansion(name)
        where = place(self.source.path, line)
        for message in messages:
            if message["role"] == "assistant" and names_in([message]):
                raise UserError(f"{where}: an assistant's message has an image; models say text: move it to a user's")
        rest = messages[len(prompt) :]
        return replace(example, prompt=messages[: len(prompt)], response=rest if response else example.response)

    def _texts(
        self, record: Record, line: int
    ) -> tuple[Record, tuple[str, ...], Prompt, Response | None, Response | None]:
        """Return the record, perhaps with a prompt, the fields of the responses, and the prompt and responses.

        Raises UserError and LeftOut.
        """
        source, where = self.source, place(self.source.path, line)
        if self.pairs:
            fields: tuple[str, ...] = (source.chosen_field, source.rejected_field)
            if find(record, source.prompt_field) is ABSENT and (before := self._conversation(record)):
                fields += tuple(name for name in CONVERSATIONS if record.get(name) is before)
                record = {**record, source.prompt_field: before}
            return record, fields, *pair_of(source, record, where)
        if not self.responses:
            return record, (), prompt_of(source, record, where), None, None
        # The configured field, otherwise a common one of supervised data sets.
        field = source.response_field
        if "response_field" not in self._named and find(record, field) is ABSENT:
            usual = (name for name in (COMPLETION, *CONVERSATIONS) if isinstance(record.get(name), list | str))
            field = next(usual, field)
        prompt, response, left = given_response(source, record, field, where)
        if left:
            self.notes.setdefault("messages behind the last turn to train on are left out", line)
        if isinstance(prompt, list) and is_answer(prompt[0]) and source.train_on == "all":
            self.notes.setdefault("an answer at the start of a conversation belongs to the prompt", line)
        if record.get("label") is False:
            self.notes.setdefault(
                "'label' is false, and the response is trained like any other; `where: {label: true}` of the "
                "source leaves such records out",
                line,
            )
        return record, (field,), prompt, response, None

    def _example(self, record: Record, line: int) -> Example:
        """Make an example from a record of JSON values.

        Raises UserError for a missing field or a wrong type, and LeftOut.
        """
        source, where = self.source, place(self.source.path, line)
        record, fields, prompt, response, rejected = self._texts(record, line)
        with_its_system = with_system(source, record, prompt)
        system, prompt = SYSTEM if with_its_system is not prompt else (), with_its_system
        tools, arguments = find(record, source.tools_field), find(record, source.template_field)
        functions = [] if tools is ABSENT else tools_of(tools)
        if functions is None and "tools_field" in self._named:
            raise UserError(f"{where}: {source.tools_field!r} is {kind_of(tools)}; write a list of functions")
        if functions is None:
            self.notes.setdefault(
                f"{source.tools_field!r} is {kind_of(tools)} that holds no list of functions, and the model is not "
                "told of any",
                line,
            )
        with located(f"{where}: {source.template_field!r}"):
            own_arguments = {} if arguments is ABSENT else template_arguments(arguments)
        # Fields with other names are kept too: a verifier may use the data's own name.
        used = {*fields, *({"prompt", "answer"} & {source.prompt_field, source.answer_field})}
        metadata = {name: value for name, value in record.items() if name not in used}
        image_field = set() if self.vision is None else {self._image_field(record)}
        for name in metadata.keys() - self._read_columns - image_field - set(system):
            if metadata[name] not in (None, "", []):
                self.unread.setdefault(name, line)
        answer = find(record, source.answer_field)
        answer = find(record, GROUND_TRUTH) if answer is ABSENT else answer
        if answer is ABSENT:
            is_needed = "answer_field" in self._named
            answer = find_required(where, "answer", source.answer_field, record) if is_needed else None
        elif isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = str(answer)  # verifiers compare text
        arguments = {**source.template, **own_arguments}
        messages = [m for part in (prompt, response, rejected) if isinstance(part, list) for m in part]
        messages_by_role = [("user", prompt), *((message["role"], message.get("content")) for message in messages)]
        marked = bool(record.get(source.images_field) or record.get(IMAGE))
        for role, content in messages_by_role[isinstance(prompt, list) :] if self.vision is None else ():
            if isinstance(content, list) or (marked and isinstance(content, str) and MARK in content):
                raise UserError(
                    f"{where}: a {role}'s message has an image, and the model reads text; take a model that sees "
                    "(`braid check` says which), or leave images out by a `convert` of your own"
                )
        for message in messages:
            if message["role"] not in ROLES:
                self.notes.setdefault(f"the role {message['role']!r} is none of {', '.join(ROLES)}", line)
            if message["role"] != "assistant" and any(message.get(name) for name in TRAINED):
                name = next(name for name in TRAINED if message.get(name))
                self.notes.setdefault(f"{name!r} of a {message['role']}'s message; only assistants' are trained", line)
        return Example(prompt, answer, response, metadata, line, rejected, functions or [], arguments)


def without_nulls(value: Any) -> Any:
    """Remove null keys from nested objects: Arrow adds every key of any record to all records."""
    if isinstance(value, Mapping):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value
