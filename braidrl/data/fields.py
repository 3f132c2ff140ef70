"""The fields of a record: its prompt, system message, response and pair of responses, as a source names them.

Where a source names no field, common ones of the hub's data sets are read.
"""

from collections.abc import Mapping
from typing import Any

from braidrl.config import SourceConfig
from braidrl.data.chat import is_trained
from braidrl.data.conversations import Prompt, Response, check_messages, check_response, is_answer
from braidrl.data.records import Record, kind_of
from braidrl.errors import UserError, suggest
from braidrl.parsing import texts_and_numbers

CONVERSATIONS, COMPLETION = ("messages", "conversations"), "completion"
"""Fields of supervised data sets on the hub in place of `prompt` and `response`."""
SYSTEM = ("system", "system_prompt")
"""Fields with the system message of a record, beside its prompt."""
ABSENT = object()
"""The value of a field that a record lacks, or whose value is null."""


class LeftOut(Exception):
    """The reason to skip a record."""


def given_response(source: SourceConfig, record: Record, field: str, where: str) -> tuple[Prompt, Response, int]:
    """Return the prompt and the response to train on: two fields, or the parts of a conversation in one field; and the
    number of messages after them.

    A conversation is split before the turns to train on, `all` of the assistant or the `last`, and ends with one of
    these. Raises UserError if there is no such turn, or no message before it.
    """
    response_value = find_required(where, "response", field, record)
    starts = response_value[0] if isinstance(response_value, list) and response_value else None
    if isinstance(starts, dict) and not (is_answer(starts) and find(record, source.prompt_field) is not ABSENT):
        messages, least = check_messages(where, field, response_value), 0
    elif field in CONVERSATIONS and not isinstance(starts, dict):
        fault = f"is {kind_of(response_value)}" if starts is None else f"holds {kind_of(starts)}"
        raise UserError(f"{where}: {field!r} {fault}; write a list of messages {{role, content}}")
    else:
        prompt = prompt_of(source, record, where)
        response = check_response(where, field, response_value)
        if isinstance(response, str):
            return prompt, response, 0
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages, least = [*before, *response], len(before)
    answers = [number for number, message in enumerate(messages) if number >= least and message["role"] == "assistant"]
    # An answer at the start has no prompt, and belongs to the next answer's prompt.
    if not (answers := [number for number in answers if number]):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        raise UserError(
            f"{where}: {field!r} has no assistant's turn behind a prompt, but the roles {roles}; write at least a "
            "message of user and one of assistant"
        )
    if not (answers := [number for number in answers if is_trained(messages[number])]):
        raise LeftOut("the weights of its messages leave no turn to train on")
    start = answers[-1] if source.train_on == "last" else answers[0]
    end = answers[-1] + 1
    return messages[:start], messages[start:end], len(messages) - end


def pair_of(source: SourceConfig, record: Record, where: str) -> tuple[Prompt, Response, Response]:
    """Return the prompt, the chosen and the rejected response, text or messages.

    If both are complete conversations, or texts of a record without a prompt, their common beginning is the prompt.
    Raises LeftOut for equal responses, for conversations that differ before an answer, and for a response without a
    turn to train on.
    """
    fields = {"chosen": source.chosen_field, "rejected": source.rejected_field}
    chosen, rejected = (
        check_response(where, field, find_required(where, what, field, record)) for what, field in fields.items()
    )
    if chosen == rejected:
        raise LeftOut("both responses are the same")
    others = [value for name, value in record.items() if name not in fields.values()]
    if isinstance(chosen, list) and isinstance(rejected, list) and not is_answer(chosen[0]):
        same = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
        if not same or not (is_answer(chosen[same]) and is_answer(rejected[same])):
            raise LeftOut("the two conversations differ before an assistant's turn")
        pair: tuple[Prompt, Response, Response] = chosen[:same], chosen[same:], rejected[same:]
    elif isinstance(chosen, str) and isinstance(rejected, str) and not any(isinstance(v, str | list) for v in others):
        return texts_with_prompt(chosen, rejected, where)
    else:
        pair = prompt_of(source, record, where), chosen, rejected
    if not all(has_trained_turn(response) for response in pair[1:]):
        raise LeftOut("the weights of its messages leave a response of the pair without a turn to train on")
    return pair


def texts_with_prompt(chosen: str, rejected: str, where: str) -> tuple[str, str, str]:
    """Return the words that two texts both begin with, as their prompt, and the rest of each.

    Raises UserError if there are none.
    """
    both = zip(chosen, rejected, strict=False)
    same = next((n for n, (a, b) in enumerate(both) if a != b), min(len(chosen), len(rejected)))
    end = max(chosen.rfind(" ", 0, same + 1), chosen.rfind("\n", 0, same + 1))
    if end <= 0:
        raise UserError(
            f"{where}: no field 'prompt' for the prompt, and the two responses begin differently; add the prompt"
        )
    return chosen[:end], chosen[end:], rejected[end:]


def has_trained_turn(response: Response) -> bool:
    """Return False for messages without an answer that is trained on."""
    return isinstance(response, str) or any(is_answer(message) and is_trained(message) for message in response)


def find_required(where: str, what: str, field: str, record: Mapping[str, Any]) -> Any:
    """Return the value at a field. Raises UserError that names the nearest existing field."""
    value = find(record, field)
    if value is ABSENT:
        names = {name for name, _ in texts_and_numbers(record) if find(record, name) is not ABSENT}
        if field in record:
            raise UserError(
                f"{where}: the field {field!r} for the {what} is null. Leave such rows out, or set {what}_field of "
                "this source."
            )
        raise UserError(
            f"{where}: no field {field!r} for the {what}. {suggest(field, names)} Set {what}_field of this source."
        )
    return value


def find(record: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field, in which a dot enters nested fields; ABSENT for a missing or null one."""
    if field in record:
        return ABSENT if record[field] is None else record[field]
    value: Any = record
    for part in field.split("."):
        if not isinstance(value, Mapping) or value.get(part) is None:
            return ABSENT
        value = value[part]
    return value


def prompt_of(source: SourceConfig, record: Record, where: str) -> Prompt:
    """Return the prompt. Raises UserError unless it is text or chat messages, and not empty."""
    field = source.prompt_field
    prompt = find_required(where, "prompt", field, record)
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        kind = "empty" if prompt in ("", []) else kind_of(prompt)
        raise UserError(f"{where}: {field!r} is {kind}; write text, or a list of messages {{role, content}}")
    return check_messages(where, field, prompt)


def with_system(source: SourceConfig, record: Record, prompt: Prompt) -> Prompt:
    """Return a prompt with the record's system message in front; unchanged if it has one or the record none."""
    others = (record.get(name) for name in SYSTEM if name not in (source.prompt_field, source.answer_field))
    system = next((text for text in others if isinstance(text, str) and text.strip()), None)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is None or messages[0]["role"] in ("system", "developer"):
        return prompt
    return [{"role": "system", "content": system}, *messages]
