"""Data files as examples: .jsonl and .parquet in, one `Example` per line or row out, every fault named with its place.

field of the file                              part of the example
`prompt_field`                                 prompt      text, or chat messages {role, content}
`answer_field`, or reward_model.ground_truth   answer      what a verifier compares with
`response_field`, where asked for              response    text to train on
`chosen_field` and `rejected_field`, likewise  response and rejected
all others                                     metadata    JSON values, kept as they are
"""

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from braidrl.config import SourceConfig
from braidrl.errors import UserError, suggest

Message = dict[str, Any]
Prompt = str | list[Message]
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
    """Read all examples of a file, in order.

    Args:
        source: The file and its fields.
        responses: The flow trains on given responses: each example must have one.
        pairs: The flow trains on pairs: each example must have a chosen and a rejected response.

    Raises:
        UserError: Naming file and line, or row, for whatever cannot be used.
    """
    given = given_fields(source, responses, pairs)
    examples = [make_example(source, record, line, given) for line, record in read_records(source.path)]
    if not examples:
        raise UserError(f"{source.path} has no examples; write one JSON object or row for each prompt")
    return examples


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number, from 1, and the fields of each line or row. Raises UserError for a file that cannot be read."""
    check_file(path)
    return {".jsonl": read_jsonl, ".parquet": read_parquet}[path.suffix](path)


def check_file(path: Path) -> None:
    """Raise UserError for a file that is not there or of a kind that is not read; it is not opened."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{path}: files of the kind {path.suffix!r} are not read; give a .jsonl or .parquet file")
    if not path.is_file():
        raise UserError(f"no data file {path}; give the path of a .jsonl or .parquet file")


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON objects of a file by line; empty lines are skipped but counted."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if not raw.strip():
                continue
            try:
                record = decoder.decode(raw.decode("utf-8").rstrip())
            except UnicodeDecodeError:
                raise UserError(f"{place(path, number)} is not UTF-8; save the file as UTF-8") from None
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{place(path, number)} is not JSON: {error.msg} at character {error.pos + 1}"
                ) from None
            except ValueError as error:
                raise UserError(f"{place(path, number)} is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise UserError(
                    f'{place(path, number)} holds {kind_of(record)}; write a JSON object, as in {{"prompt": "1+1="}}'
                )
            yield number, record


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value; write null")


def read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows as dicts, read in batches, so that no second copy of the file is held."""
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    _check_json(path, number, record)
                    yield number, record
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file: {' '.join(str(error).split())}") from None


def _check_json(path: Path, number: int, record: Mapping[str, Any]) -> None:
    """Raise UserError for bytes, dates, NaN and whatever else could not travel or be written as JSON."""
    for name, value in record.items():
        try:
            json.dumps(value, allow_nan=False)
        except TypeError:
            fault = "holds a value that JSON has no form for (such as bytes or a date); remove the column or store it as text"
            raise UserError(f"{place(path, number)}: column {name!r} {fault}") from None
        except ValueError:
            fault = "holds a number that is not finite, which JSON has no form for; write null"
            raise UserError(f"{place(path, number)}: column {name!r} {fault}") from None


def given_fields(source: SourceConfig, responses: bool, pairs: bool) -> dict[str, str]:
    """Return the field of each given response by its name: none, one, or the two of a pair, the better first."""
    if pairs:
        return {"chosen": source.chosen_field, "rejected": source.rejected_field}
    return {"response": source.response_field} if responses else {}


def make_example(source: SourceConfig, record: dict[str, Any], line: int, given: Mapping[str, str]) -> Example:
    """Pick the configured fields out of one record. Raises UserError for a missing field or a wrong type."""
    where = place(source.path, line)
    used = {source.prompt_field, source.answer_field, *given.values()}
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


def place(path: Path, line: int) -> str:
    return f"{path}, {'row' if path.suffix == '.parquet' else 'line'} {line}"


def kind_of(value: Any) -> str:
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def field_names(record: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in record.items():
        yield prefix + name
        if isinstance(value, Mapping):
            yield from field_names(value, f"{prefix}{name}.")
