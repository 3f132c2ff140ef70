"""Chat messages in the form for chat templates, the rendering of templates, and the tokens that end a response.

content         text, null or absent beside calls, a list of {type: text, text}     ──▶ text
                a part {type: thinking, thinking}                                   ──▶ reasoning_content
arguments       an object, or its JSON as text (OpenAI)                             ──▶ an object
nulls           null means the same as absent                                       ──▶ absent
tool_calls      a list, one call, or their JSON as text                             ──▶ a list of objects
function_call   OpenAI's former field for one call, and its role `function`         ──▶ tool_calls, `tool`

Chat templates are untrusted programs: they are rendered with limits of time and size, after a trial in a separate
process.

tokenizer ──check_template: a fork with limits of memory and time──▶ may be used
messages  ──PromptTemplate.apply──▶ text, or a UserError
"""

import ctypes
import json
import os
import re
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from braidrl.errors import UserError, shown
from braidrl.parsing import parse_json

ChatMessage = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, as chat templates take them."""
TEMPLATE = "chat_template_kwargs"
"""The field of `metadata` with a row's arguments of the chat template."""
RESERVED = {
    "conversation": "set prompt_field of the source",
    "messages": "set prompt_field of the source",
    "tools": "put them into the field that tools_field of the source names",
    "chat_template": "set it in the tokenizer's chat_template.jinja",
    "add_generation_prompt": "remove it: prompts open the assistant's turn, and given responses end it",
    "continue_final_message": "remove it: a prompt that ends with an assistant's message is continued",
} | dict.fromkeys(
    (
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ),
    "remove it: prompts are tokenised whole, without padding",
)
"""Names of `apply_chat_template` that are no arguments of a template, each with its remedy."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message with its reasoning; families name it differently."""
TEXTS = ("text", "input_text", "output_text")
"""Types of parts of a message's content that are text."""
TRAINED = ("weight", "train", "training", "trainable", "loss", "loss_mask", "step_loss_mask")
"""Fields of a message that say whether it is trained, 1 or 0, true or false."""
READ = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "id", *TRAINED})
"""Fields of a message that have a meaning of their own, or that templates may leave out."""
MARK = "the-assistants-turn-stands-here"
"""Text that stands for an assistant's turn where a template is rendered."""
RENDER_S = 5.0
"""Limit of one rendering in CPU seconds, independent of other programs' load.

The largest known templates take some milliseconds.
"""
TRIAL_S = 120.0
"""Limit of a whole trial, in seconds of wall-clock time."""
TEMPLATE_CHARACTERS = 256 << 10
UNREAD_TOOLS = "the chat template does not show `tools` to the model"
RENDERED_CHARACTERS = 16 << 20
TRIAL_BYTES = 1 << 30
"""Additional memory for a trial, in bytes."""
LOOK_S = 0.25
SLOW_FILTERS = ("striptags", "urlize", "wordwrap")
"""Jinja's filters whose time grows with the square of a text, in C code that no limit of time interrupts."""
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
FUNCTION = {"name": "look", "arguments": {}}
CALL: ChatMessage = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": FUNCTION}],
}
SYSTEM, USER, ANSWER, RESULT = ({"role": role, "content": "a"} for role in ("system", "user", "assistant", "tool"))
TRIALS: Sequence[tuple[list[ChatMessage], Tools]] = (
    ([USER], ()),
    ([SYSTEM, USER, ANSWER, USER], ()),
    ([USER, CALL, {**RESULT, "tool_call_id": "call00000"}, ANSWER, USER], (TOOL,)),
)


def normal_message(message: Mapping[str, Any]) -> ChatMessage:
    """Return a message in the form for chat templates. Raises UserError for calls whose arguments are not JSON."""
    fields = {name: value for name, value in message.items() if value is not None}
    # Templates test only whether the name exists.
    calls, former = fields.pop("tool_calls", None), fields.pop("function_call", None)
    calls = listed_calls(calls) or ([former] if former else None)
    if fields.get("role") == "function":
        fields["role"] = "tool"
    content = fields.get("content", "")
    if isinstance(content, list) and content:
        thoughts = [thought for part in content if (thought := thought_of(part)) is not None]
        if thoughts and not any(fields.get(name) for name in REASONING):
            fields["reasoning_content"] = "\n\n".join(thoughts)
            content = [part for part in content if thought_of(part) is None]
        texts = [p.get("text") if isinstance(p, Mapping) and p.get("type") in TEXTS else None for p in content]
        # Content with other parts is unchanged.
        content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else content
    normal = {**fields, "content": content}
    if not calls:
        return normal
    normal["tool_calls"] = []
    for call in calls:
        if not isinstance(call, Mapping):
            raise UserError(f"a call of a tool is an object with `function`, not {call!r}")
        is_nested = isinstance(call.get("function"), Mapping)
        function = call["function"] if is_nested else call
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments) if arguments.strip() else {}
            except ValueError:
                name = function.get("name")
                fault = f"the arguments of a call of {name!r} are not JSON: {arguments[:80]!r}; write an object"
                raise UserError(fault) from None
        named = {key: value for key, value in function.items() if key != "parameters"}
        function = {**named, "arguments": {} if arguments is None else arguments}
        about = call if is_nested else {"type": "function"}
        normal["tool_calls"].append({**about, "function": function})
    return normal


def thought_of(part: Any) -> str | None:
    """Return the text of a part of a message's content that is its reasoning; None for other parts."""
    if not isinstance(part, Mapping) or part.get("type") not in ("thinking", "reasoning"):
        return None
    thought = part.get("thinking", part.get("reasoning", part.get("text")))
    if isinstance(thought, list):
        thought = "".join(str(piece.get("text", "")) if isinstance(piece, Mapping) else str(piece) for piece in thought)
    return thought if isinstance(thought, str) else None


def listed_calls(calls: Any) -> list[Any]:
    """Return the calls of a message as a list; they may be one call, or JSON text of either."""
    if isinstance(calls, str):
        try:
            calls = parse_json(calls) if calls.strip() else []
        except ValueError as error:
            raise UserError(f"the calls of tools are no JSON: {error}; write a list of objects") from None
    return list(calls) if isinstance(calls, list | tuple) else [calls] if calls else []


def text_of(content: Any) -> str:
    """Return the text of a message's content; an image becomes `<image>`."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "<image>")) for part in content)


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools in a value: an object or a list of objects, the list and each object possibly as JSON text.

    Null gives an empty list, any other value None.
    """
    try:
        value = parse_json(value) if isinstance(value, str) and value.strip() else value
        if isinstance(value, Mapping) and {"name", "function", "type"} & set(value):
            value = [value]
        if isinstance(value, list):
            value = [parse_json(tool) if isinstance(tool, str) else tool for tool in value]
    except ValueError:
        return None
    if value in (None, [], {}) or (isinstance(value, str) and not value.strip()):
        return []
    is_list = isinstance(value, list) and all(isinstance(tool, dict) for tool in value)
    return value if is_list else None


def template_arguments(value: Any) -> dict[str, Any]:
    """Return arguments of a chat template: an object, or its JSON as text; empty for null.

    Raises UserError for other values, and for names that are reserved by the template.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else {}
        except ValueError as error:
            raise UserError(f"arguments of a chat template are no JSON: {error}; write an object") from None
    if not isinstance(value, Mapping | None):
        raise UserError(f"arguments of a chat template are {shown(value)}; write an object")
    for name in value or ():
        if name in RESERVED:
            raise UserError(f"the argument {name!r} of the chat template is reserved; {RESERVED[name]}")
    return dict(value or {})


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return True if an assistant's message is trained, the default.

    Raises UserError for weights other than 0 and 1.
    """
    marks = {name: message[name] for name in TRAINED if message.get(name) is not None}
    for name, value in marks.items():
        if value not in (0, 1) or not isinstance(value, bool | int | float):
            raise UserError(f"{name!r} of a message is {shown(value)}, and only 0 and 1 are read; write one of them")
    return all(marks.values())


def for_template(message: ChatMessage) -> ChatMessage:
    """Return a message in the form for templates: its reasoning under every family's name, without weights."""
    reasoning = next((message[name] for name in REASONING if message.get(name)), None)
    aliases = dict.fromkeys(REASONING, reasoning) if isinstance(reasoning, str) else {}
    return {**{name: value for name, value in message.items() if name not in TRAINED}, **aliases}


class Overdue(BaseException):
    """The watch raises this inside a rendering; exception handlers of a template do not catch it."""

    def __str__(self) -> str:
        return f"took more than {RENDER_S:g} s"


def check_template(tokenizer: Any) -> None:
    """Raise UserError for a chat template that is not text, is too long, needs too much time or memory for short
    conversations, or ends its process.

    It is compiled and rendered in a fork of this process with limits, because a template can allocate any amount of
    memory.
    """
    template = tokenizer.chat_template
    if not template:
        return
    remove_slow_filters()
    for text in template.values() if isinstance(template, dict) else [template]:
        if not isinstance(text, str):
            raise UserError(f"the tokenizer's chat template is no text, but {shown(text)}")
        if len(text) > TEMPLATE_CHARACTERS:
            raise UserError(
                f"the tokenizer's chat template has {len(text)} characters, and at most {TEMPLATE_CHARACTERS} are taken"
            )
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try_template(tokenizer, theirs)
    os.close(theirs)
    ready, _, _ = select.select([ours], [], [], TRIAL_S)
    outcome = os.read(ours, 100) if ready else b"took too long"
    os.close(ours)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not outcome and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        outcome = b"took too long"
    if outcome != b"rendered":
        raise UserError(
            f"the tokenizer's chat template {outcome.decode() or 'ended its process'} for a short conversation; copy "
            "the template that belongs to this model"
        )


def remove_slow_filters() -> None:
    """Remove Jinja filters that chat templates do not need and that time limits cannot interrupt; Jinja then refuses a
    template that uses one.
    """
    from jinja2.filters import FILTERS

    for name in SLOW_FILTERS:
        FILTERS.pop(name, None)


def try_template(tokenizer: Any, line: int) -> NoReturn:
    """Render some conversations, in a fork, and write the outcome to a pipe. A template may refuse any of them."""
    from jinja2 import nodes

    def end_without_memory(*_: Any) -> None:
        if isinstance(sys.exc_info()[1], MemoryError):
            os.write(line, b"takes more than 1 GiB of memory")
            os._exit(0)

    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, RENDER_S)
        # Jinja evaluates constants when it compiles, and swallows exceptions there; they would occur again later,
        # without limits.
        nodes.Impossible.__init__ = end_without_memory  # type: ignore[assignment]
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = taken + TRIAL_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
        for messages, tools in TRIALS:
            try:
                tokenizer.apply_chat_template(
                    messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
                )
            except Exception:
                end_without_memory()
        os.write(line, b"rendered")
    finally:
        os._exit(1)


class RenderingWatch:
    """A context in which a rendering that takes too long raises Overdue.

    One thread watches the renderings of all threads.
    """

    _process = 0

    def __enter__(self) -> None:
        # A fork has none of its parent's threads, and one of these may hold the lock.
        if self._process != os.getpid():
            self._lock, self._process = threading.Lock(), os.getpid()
            self._until, self._ended = dict[int, float](), set[int]()
            threading.Thread(target=self._look, daemon=True, name="rendering watch").start()
        thread = threading.get_ident()
        with self._lock:
            self._ended.discard(thread)
            self._until[thread] = time.thread_time() + RENDER_S

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        with self._lock:
            self._until.pop(thread, None)
            late = thread in self._ended
            self._ended.discard(thread)
        if late:
            set_exception(thread, None)
            raise Overdue

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                for thread, until in list(self._until.items()):
                    if until < time.clock_gettime(time.pthread_getcpuclockid(thread)):
                        del self._until[thread]
                        self._ended.add(thread)
                        set_exception(thread, Overdue)


WATCH = RenderingWatch()


def set_exception(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in another thread when it next runs Python code; None cancels a pending one."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind) if kind else None)


def end_ids_of(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a response of the model in a Hugging Face directory; see `end_of_sequence_ids`."""
    files = [folder / name for name in ("generation_config.json", "config.json")]
    return end_of_sequence_ids(tokenizer, *(json.loads(file.read_bytes()) for file in files if file.is_file()))


def end_of_sequence_ids(tokenizer: Any, *settings: Any) -> tuple[int, ...]:
    """Return the end ids of the tokenizer and of the model's settings (objects or JSON), and the end of a turn in the
    chat template.
    """

    def value_of(part: Any, name: str) -> Any:
        return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)

    tokens = [tokenizer.eos_token_id]
    for part in (p for source in settings for p in (source, value_of(source, "text_config"))):
        ends = value_of(part, "eos_token_id")
        tokens += ends if isinstance(ends, Sequence) else [ends]
    return tuple(dict.fromkeys(token for token in (*tokens, turn_end_id(tokenizer)) if token is not None))


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the special tokens by id: the named ones, and added tokens marked as special, such as the end of a turn in
    Gemma 3 and Phi 3.
    """
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return named | {number: token.content for number, token in added.items() if token.special}


def special_text(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens' texts, longest first; None if there are none."""
    texts = sorted({text for text in special_tokens(tokenizer).values() if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def turn_end_id(tokenizer: Any) -> int | None:
    """Return the special token that closes an assistant's turn in the chat template, or None."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}]
    try:
        with WATCH:
            after = tokenizer.apply_chat_template(turn, tokenize=False).rpartition(MARK)[2]
    # A template may refuse this conversation with any exception; its end of a turn is then unknown.
    except (Exception, Overdue):
        return None
    ids = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]
    return ids[0] if ids and ids[0] in special_tokens(tokenizer) else None
