"""Records as examples: one `Example` per line or row, every fault named with its place, and a count of what is left out and why.

records ──where──▶ ──convert──▶ ──unique──▶ ──skip, first──▶ examples

field of a record                              part of the example
`prompt_field`                                 prompt      text, or chat messages {role, content}
`answer_field`, or reward_model.ground_truth   answer      what a verifier compares with
`response_field`, where asked for              response    text to train on
`chosen_field` and `rejected_field`, likewise  response and rejected
all but the responses, under their own names   metadata    JSON values, kept as they are
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from braidrl.config import SourceConfig
from braidrl.data.conversions import conversion_of
from braidrl.data.records import Record, kind_of, place, read_records
from braidrl.errors import UserError, suggest

ChatMessage = dict[str, Any]
Prompt = str | list[ChatMessage]
# verl's files keep the reference answer here.
GROUND_TRUTH = "reward_model.ground_truth"
ABSENT = object()


@dataclass(frozen=True, slots=True)
class Example:
    """One line of a data file; `line` counts from 1."""

    prompt: Prompt
    answer: Any
    response: str | None
    metadata: dict[str, Any]
    line: int
    rejected: str | None = None


def read_examples(source: SourceConfig, *, responses: bool = False, pairs: bool = False) -> list[Example]:
    """Read all examples of a source, in order; see `Reading`."""
    return list(Reading(source, responses=responses, pairs=pairs))


class Reading:
    """One pass over a source, which yields its examples in order; `left_out` then says how many records are none, by reason."""

    def __init__(
        self, source: SourceConfig, *, responses: bool = False, pairs: bool = False, usual_split: str = "train"
    ) -> None:
        """Begin before the first record.

        Args:
            source: The file or folder, what is chosen of it, and its fields.
            usual_split: As for `read_records`.
            responses: The flow trains on given responses: each example must have one.
            pairs: The flow trains on pairs: each example must have a chosen and a rejected response.
        """
        self.source, self.given, self.usual_split = source, given_fields(source, responses, pairs), usual_split
        self.conversion = conversion_of(source)
        self.left_out: Counter[str] = Counter()
        self._seen: set[bytes] = set()

    def __iter__(self) -> Iterator[Example]:
        """Yield the examples. Raises UserError, naming file and line, or row, for whatever cannot be used, and where there are none."""
        source, number = self.source, 0
        end = None if source.first is None else source.skip + source.first
        for line, record in read_records(source, self.usual_split):
            if number == end:
                return
            found = self._chosen(record, line)
            if isinstance(found, str):
                self.left_out[found] += 1
                continue
            number += 1
            if number > source.skip:
                yield found
        if number <= source.skip:
            raise UserError(
                f"{source.path} has no examples{self._of_which()}; write one JSON object or row for each prompt"
            )

    def _chosen(self, record: Record, line: int) -> Example | str:
        """Return the example that a record is, or why it is none."""
        for field, wanted in self.source.where.items():
            if find(record, field) not in (wanted if isinstance(wanted, list) else [wanted]):
                return f"{field} is another than `where` says"
        converted = self._converted(record, line)
        if isinstance(converted, str):
            return converted
        example = make_example(self.source, converted, line, self.given)
        if self.source.unique or self.conversion.unique:
            key = hashlib.blake2b(json.dumps(example.prompt).encode(), digest_size=16).digest()
            if key in self._seen:
                return "the prompt was there before"
            self._seen.add(key)
        return example

    def _converted(self, record: Record, line: int) -> Record | str:
        where = place(self.source.path, line)
        try:
            converted = self.conversion.function(record)
        except Exception as error:
            raise UserError(
                f"{where}: data conversion {self.source.convert} raised {type(error).__name__}: {error}; return the example, or a "
                "text that says why it is left out"
            ) from error
        if not isinstance(converted, dict | str):
            raise UserError(
                f"{where}: data conversion {self.source.convert} returned {kind_of(converted)}; return a dict, or a text that says "
                "why the record is left out"
            )
        return converted

    def _of_which(self) -> str:
        source = self.source
        said = [f"{count} left out because {reason}" for reason, count in self.left_out.items()]
        said += [f"the first {source.skip} are skipped"] if source.skip else []
        return f" ({', '.join(said)})" if said else ""


def given_fields(source: SourceConfig, responses: bool, pairs: bool) -> dict[str, str]:
    """Return the field of each given response by its name: none, one, or the two of a pair, the better first."""
    if pairs:
        return {"chosen": source.chosen_field, "rejected": source.rejected_field}
    return {"response": source.response_field} if responses else {}


def make_example(source: SourceConfig, record: dict[str, Any], line: int, given: Mapping[str, str]) -> Example:
    """Pick the configured fields out of one record. Raises UserError for a missing field or a wrong type."""
    where = place(source.path, line)
    # Of other names they are kept too: a verifier may ask for the field as the data call it.
    used = {"prompt", "answer", *given.values()} & {source.prompt_field, source.answer_field, *given.values()}
    texts = [check_response(where, field, find_required(where, what, field, record)) for what, field in given.items()]
    response, rejected = (*texts, None, None)[:2]
    prompt = find_required(where, "prompt", source.prompt_field, record)
    return Example(
        prompt=check_prompt(where, source.prompt_field, prompt),
        answer=find_answer(where, source, record),
        response=response,
        metadata={name: value for name, value in record.items() if name not in used},
        line=line,
        rejected=rejected,
    )


def find_answer(where: str, source: SourceConfig, record: Mapping[str, Any]) -> Any:
    """Return the reference answer, or None where the file has none. Raises UserError when a field named in the configuration is missing."""
    answer = find(record, source.answer_field)
    if answer is ABSENT:
        answer = find(record, GROUND_TRUTH)
    if answer is not ABSENT:
        # Verifiers compare text.
        return str(answer) if isinstance(answer, int | float) and not isinstance(answer, bool) else answer
    # Not `model_fields_set`: a resolved configuration that is read again sets every field.
    if source.answer_field != SourceConfig.model_fields["answer_field"].default:
        return find_required(where, "answer", source.answer_field, record)
    return None


def find_required(where: str, what: str, field: str, record: Mapping[str, Any]) -> Any:
    """Return the value at a field. Raises UserError naming the nearest field that there is."""
    value = find(record, field)
    if value is ABSENT:
        known = [name for name in field_names(record) if find(record, name) is not ABSENT]
        raise UserError(
            f"{where}: no field {field!r} for the {what}. {suggest(field, known)} Set {what}_field of this source."
        )
    return value


def find(record: Mapping[str, Any], field: str) -> Any:
    """Return the value at a field, where a dot enters nested fields; ABSENT where there is none, or null."""
    if field in record:
        return ABSENT if record[field] is None else record[field]
    value: Any = record
    for part in field.split("."):
        if not isinstance(value, Mapping) or value.get(part) is None:
            return ABSENT
        value = value[part]
    return value


def check_prompt(where: str, field: str, prompt: Any) -> Prompt:
    """Return the prompt. Raises UserError unless it is text or chat messages, and not empty."""
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        found = "empty" if prompt in ("", []) else kind_of(prompt)
        raise UserError(f"{where}: {field!r} is {found}; write text, or a list of messages {{role, content}}")
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, dict):
            raise UserError(f"{where}: message {number} of {field!r} is {kind_of(message)}; write {{role, content}}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = f"is {kind_of(message[key])}" if message.get(key) is not None else "is missing"
                raise UserError(f"{where}: {key!r} of message {number} of {field!r} {found}; write text")
    return prompt


def check_response(where: str, field: str, response: Any) -> str:
    """Return the response. Raises UserError unless it is text."""
    if not isinstance(response, str):
        raise UserError(f"{where}: {field!r} is {kind_of(response)}; write the response as text")
    return response


def field_names(record: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in record.items():
        yield prefix + name
        if isinstance(value, Mapping):
            yield from field_names(value, f"{prefix}{name}.")
