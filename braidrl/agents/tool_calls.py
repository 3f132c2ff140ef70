"""Tool calls in the formats of model families. Environments and clients always see the format of Hermes and Qwen; the
model's tokens stay unchanged.

the model's turn ─format─▶ text and `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` ─parse_tool_calls─▶ calls

A malformed call stays malformed in the conversion: `parse_tool_calls` describes the fault to the model.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from braidrl.data.chat import Tools
from braidrl.parsing import TOO_DEEP, check_levels, parse_json

DECODER = json.JSONDecoder()

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
CLOSED_CALL = re.compile("</tool_call>|(?=<tool_call>)")
"""The end of a call: its tag, or the next call where it has none."""
CALL_ID = "call{:05d}"
"""The id of a turn's call by its number; some chat templates need one, Mistral's one of nine characters."""


@dataclass(frozen=True)
class ToolCall:
    """One call by the model; `fault` says why it cannot be executed."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    fault: str | None = None


def json_at(text: str, begin: int) -> tuple[Any, int]:
    """Parse the JSON value at a position of a model's text; return it and its end.

    Raises ValueError if there is none, and for one that is nested too deep.
    """
    try:
        value, end = DECODER.raw_decode(text, begin)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_levels(value)
    return value, end


def as_text(value: Any) -> str:
    """Return arguments as JSON. Raises ValueError for values that are nested too deep or have no JSON form."""
    check_levels(value)
    try:
        return json.dumps(value)
    except TypeError as error:
        raise ValueError(str(error)) from None


def between_tags(text: str, begins: str, ends: re.Pattern[str]) -> list[str]:
    """Return each text between a tag and the pattern that ends it.

    JSON in it ends where its value ends: one of its strings may contain the closing tag.
    """
    bodies, begin = list[str](), text.find(begins)
    while begin >= 0:
        begin += len(begins)
        closed = ends.search(text, begin)
        value = text.find("{", begin, closed.start() if closed else len(text))
        if closed and value >= 0:
            with suppress(ValueError):
                closed = ends.search(text, max(closed.start(), json_at(text, value)[1]))
        end = closed.start() if closed else len(text)
        bodies.append(text[begin:end])
        begin = text.find(begins, end)
    return bodies


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Return every call in a turn, in order, including malformed ones."""
    return [parse_call(body) for body in between_tags(text, OPEN_CALL, CLOSED_CALL)]


def parse_call(body: str) -> ToolCall:
    """Return the call of an object {name, arguments}, as models write it.

    Arguments may be named `parameters`, as Llama's, and be JSON text, and both may be inside `function`, as OpenAI's.
    """
    try:
        call = parse_json(body, finite=False, refuse_surrogates=False)
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call = call["function"]
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return ToolCall(fault='a call is an object {"name": ..., "arguments": {...}}')
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = parse_json(arguments, finite=False, refuse_surrogates=False)
    except ValueError as error:
        return ToolCall(fault=f"the call is not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], fault="the arguments must be an object")
    return ToolCall(call["name"], arguments)


@dataclass(frozen=True)
class ToolFormat:
    """The call format of a model family."""

    begins: re.Pattern[str]
    """The pattern of the beginning of the first call."""
    calls: Callable[[str, Tools], list[str]]
    """Takes the text from there on, and returns each call as Hermes' JSON, or unchanged if it cannot be converted."""
    marks: tuple[str, ...]
    """Texts that all occur in a chat template of the family."""

    def rewritten(self, text: str, tools: Tools) -> tuple[str, str] | None:
        """Return the text before a turn's calls, and the calls in Hermes' format; None if there are none."""
        match = self.begins.search(text)
        if match is None:
            return None
        return text[: match.start()], tagged(self.calls(text[match.start() :], tools))


def tagged(calls: Sequence[str]) -> str:
    """Return calls in Hermes' JSON between Hermes' tags."""
    return "".join(f"{OPEN_CALL}{call}{CLOSE_CALL}" for call in calls)


def call_text(name: str, arguments: str) -> str:
    """Return a call in Hermes' format with arguments that are JSON, possibly malformed."""
    return f'{{"name": {json.dumps(name.strip())}, "arguments": {arguments.strip() or "{}"}}}'


def up_to_last(text: str, end: str) -> str:
    """Return a text up to its last closing tag, so that a search finds an end for each beginning, in linear time."""
    return text[: text.rfind(end) + len(end)] if end in text else ""


# Names exclude `<`, so that a failed search does not continue past the next tag.
FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


def qwen_xml(text: str, tools: Tools) -> list[str]:
    """Return the calls of Qwen3-Coder and Qwen 3.5: `<function=NAME><parameter=KEY>VALUE</parameter></function>`
    between the tags.
    """
    closed = FUNCTION.finditer(up_to_last(text, "</function>"))
    return [with_values(match[1], PARAMETER.findall(match[2]), tools) for match in closed] or [text]


CLOSED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|$)", re.DOTALL)


def glm(text: str, tools: Tools) -> list[str]:
    """Return the calls of GLM 4.5 and later:
    `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.
    """
    bodies = [match[1] for match in CLOSED.finditer(up_to_last(text, "</tool_call>"))]
    return [with_values(body.partition("<arg_key>")[0], ARGUMENT.findall(body), tools) for body in bodies] or [text]


def types_of(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows, as far as it names any."""
    if not isinstance(schema, Mapping):
        return set()
    named, choices = schema.get("type"), schema.get("anyOf")
    types = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    return types.union(*map(types_of, choices if isinstance(choices, list) else ()))


def with_values(name: str, values: Sequence[tuple[str, str]], tools: Tools) -> str:
    """Return a call with arguments given as text: strings if the schema says so, otherwise JSON if they parse."""
    functions = (tool.get("function") or tool for tool in tools)
    schema: Any = next((function for function in functions if function.get("name") == name.strip()), {})
    properties = (schema.get("parameters") or {}).get("properties") or {}
    arguments: dict[str, Any] = {key.strip(): text for key, text in values}
    for key, text in arguments.items():
        kinds = types_of(properties.get(key))
        # An optional text is null only if the model writes null.
        if kinds - {"null"} != {"string"} or (text == "null" and "null" in kinds):
            # A value that is not JSON, or too deep, is text.
            with suppress(ValueError):
                arguments[key] = parse_json(text, finite=False, refuse_surrogates=False)
    return call_text(name, json.dumps(arguments))


BETWEEN = re.compile(r"[; \n,]*")


def llama(text: str, tools: Tools) -> list[str]:
    """Return the calls of Llama 3.1 and later.

    They are `{"name": ..., "parameters": {...}}`, several with `;` between them, perhaps after `<|python_tag|>`; or
    `<function=NAME>{...}</function>`; or, of Llama 3.2 and 4, a list in Python, `[NAME(KEY=VALUE), ...]`.
    """
    text = re.sub(r"<\|(?:python_tag|python_start|python_end|eom_id|eot_id|eot|eom)\|>", "", text).strip()
    if text.startswith("<function="):
        closed = FUNCTION.finditer(up_to_last(text, "</function>"))
        return [call_text(match[1], match[2]) for match in closed] or [text]
    if text.startswith("["):
        # The list is parsed but not executed.
        try:
            listed: Any = ast.parse(text, mode="eval").body
            return [
                call_text(ast.unparse(call.func), as_text({k.arg: ast.literal_eval(k.value) for k in call.keywords}))
                for call in listed.elts
            ]
        except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
            return [text]
    calls, begin = list[str](), 0
    while begin < len(text):
        try:
            call, end = json_at(text, begin)
        except ValueError:
            return [*calls, text[begin:]]
        arguments = call.get("parameters", call.get("arguments", {})) if isinstance(call, dict) else {}
        is_call = isinstance(call, dict) and "name" in call
        calls.append(call_text(str(call["name"]), as_text(arguments)) if is_call else text[begin:end])
        between = BETWEEN.match(text, end)
        begin = between.end() if between else end
    return calls


NAMED = re.compile(r"\s*([^\[\s{]+)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(.*)", re.DOTALL)
CLOSED_NAMED = re.compile(r"(?=\[TOOL_CALLS\])|</s>")


def mistral(text: str, tools: Tools) -> list[str]:
    """Return the calls of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or since 2025
    `[TOOL_CALLS]NAME[ARGS]{...}` each.
    """
    listed = re.match(r"\[TOOL_CALLS\]\s*(?=\[[\s{\]])", text)
    if listed is None:
        bodies = between_tags(text, "[TOOL_CALLS]", CLOSED_NAMED)
        named = [(body, NAMED.match(body)) for body in bodies]
        return [call_text(match[1], match[2]) if match and match[2] else body for body, match in named] or [text]
    try:
        calls, _ = json_at(text, listed.end())
        return [as_text(call) for call in calls]
    except ValueError:
        return [text[listed.end() :]]


CLOSED_PIECE = re.compile("<｜tool▁call▁end｜>|<｜tool▁calls▁end｜>")
FENCED = re.compile(r"(.*?)\n```(?:json)?\n(.*?)(?:\n```|$)", re.DOTALL)


def deepseek(text: str, tools: Tools) -> list[str]:
    """Return the calls of DeepSeek V3 and R1, `function<｜tool▁sep｜>NAME` and JSON in a fence, and of V3.1,
    `NAME<｜tool▁sep｜>{...}`.
    """
    calls = list[str]()
    for body in between_tags(text, "<｜tool▁call▁begin｜>", CLOSED_PIECE):
        first, _, second = body.partition("<｜tool▁sep｜>")
        fenced = FENCED.match(second)
        name, arguments = (fenced[1], fenced[2]) if fenced else (first, second)
        calls.append(call_text(name, arguments) if arguments else body)
    return calls or [text]


# A call of gpt-oss names its function before or behind the channel, and ends with the turn.
HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)?\s*to=functions\.([\w.-]+)[^{]{0,100}?<\|message\|>"
)
CLOSED_HARMONY = re.compile(r"<\|call\|>|<\|end\|>|<\|return\|>|(?=<\|start\|>)")


def harmony(text: str, tools: Tools) -> list[str]:
    """Return the calls of gpt-oss: `<|channel|>commentary to=functions.NAME <|message|>{...}<|call|>`."""
    calls = list[str]()
    for match in HARMONY.finditer(text):
        body = between_tags(text[match.end() - len("<|message|>") :], "<|message|>", CLOSED_HARMONY)
        calls.append(call_text(match[1], body[0]) if body[0].strip() else body[0])
    return calls or [text]


CLOSED_SECTION = re.compile(r"<\|tool_call_end\|>|<\|tool_calls_section_end\|>")


def kimi(text: str, tools: Tools) -> list[str]:
    """Return the calls of Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}`."""
    calls = list[str]()
    for body in between_tags(text, "<|tool_call_begin|>", CLOSED_SECTION):
        name, _, arguments = body.partition("<|tool_call_argument_begin|>")
        name = name.strip().removeprefix("functions.").rpartition(":")[0] or name
        calls.append(call_text(name, arguments) if arguments else body)
    return calls or [text]


def listed(text: str, tools: Tools) -> list[str]:
    """Return the calls of Granite and Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}]`."""
    begin = LISTED.match(text)
    try:
        calls, _ = json_at(text, begin.end() if begin else 0)
        return [as_text(call) for call in (calls if isinstance(calls, list) else [calls])]
    except ValueError:
        return [text]


LISTED = re.compile(r"<\|tool_call\|>\s*")
TAG = re.compile("<tool_call>")
FORMATS = {
    "harmony": ToolFormat(HARMONY, harmony, ("<|channel|>", "functions.")),
    "kimi": ToolFormat(
        re.compile(r"<\|tool_calls_section_begin\|>|<\|tool_call_begin\|>"), kimi, ("<|tool_call_begin|>",)
    ),
    "listed": ToolFormat(LISTED, listed, ("<|tool_call|>",)),
    "deepseek": ToolFormat(re.compile("<｜tool▁calls▁begin｜>|<｜tool▁call▁begin｜>"), deepseek, ("<｜tool▁call",)),
    "mistral": ToolFormat(re.compile(r"\[TOOL_CALLS\]"), mistral, ("[TOOL_CALLS]",)),
    "glm": ToolFormat(TAG, glm, ("<arg_key>",)),
    "qwen_xml": ToolFormat(re.compile(r"<tool_call>\s*<function=|<function="), qwen_xml, ("<function=", "<parameter=")),
    # Hermes 2 and 3, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    "hermes": ToolFormat(TAG, lambda text, tools: between_tags(text, OPEN_CALL, CLOSED_CALL), ("<tool_call>",)),
    "llama": ToolFormat(
        re.compile(
            r"<\|python_(?:tag|start)\|>|<function=|"
            r"\A\s*(?:<\|python_start\|>)?(?=\{\s*\"name\"|\[\s*[A-Za-z_][\w.]*\()"
        ),
        llama,
        ("<|start_header_id|>",),
    ),
}
"""The formats by name, those with rarer marks first."""


def format_of(chat_template: str | None) -> ToolFormat:
    """Return the format that a chat template uses; Hermes' format if none is recognised."""
    template = chat_template or ""
    formats = (form for form in FORMATS.values() if all(mark in template for mark in form.marks))
    return next(formats, FORMATS["hermes"])
