"""Rendering of chat templates, which are untrusted programs: with limits of time and size, after a trial in a separate process.

tokenizer ──check_template: a fork with limits of memory and time──▶ may be used        messages ──render_chat──▶ text, or a UserError
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from jinja2 import nodes

from braidrl.data.chat import ChatMessage, Tools
from braidrl.errors import UserError, shown

RENDER_S = 5.0
"""Limit of one rendering in CPU seconds, independent of other programs' load. The largest known templates take some milliseconds."""
TRIAL_S = 120.0
"""Limit of a whole trial, in seconds of wall-clock time."""
TEMPLATE_CHARACTERS = 256 << 10
RENDERED_CHARACTERS = 16 << 20
TRIAL_BYTES = 1 << 30
"""Additional memory for a trial, in bytes."""
LOOK_S = 0.25
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
SYSTEM, USER, ANSWER, RESULT = (
    {"role": role, "content": "a"} for role in ("system", "user", "assistant", "tool")
)  # fmt: skip
TRIALS: Sequence[tuple[list[ChatMessage], Sequence[Mapping[str, Any]]]] = (
    ([USER], ()),
    ([SYSTEM, USER, ANSWER, USER], ()),
    ([USER, CALL, {**RESULT, "tool_call_id": "call00000"}, ANSWER, USER], (TOOL,)),
)


class Overdue(BaseException):
    """The watch raises this inside a rendering; exception handlers of a template do not catch it."""


def render_chat(
    tokenizer: Any, messages: Sequence[ChatMessage], tools: Tools = (), opens: bool = True,
    arguments: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """Render messages with a tokenizer's chat template.

    Args:
        tokenizer: The tokenizer with the template.
        messages: The conversation.
        tools: JSON schemas of functions.
        opens: Open the assistant's turn at the end.
        arguments: Further arguments of the template.

    Raises:
        UserError: The template refuses the messages, fails, or breaks a limit of time or size.
    """
    check_size(tokenizer)
    try:
        WATCH.begin(RENDER_S)
        try:
            text: str = tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=opens, **(arguments or {})
            )  # fmt: skip
        finally:
            WATCH.end()
    except Overdue:
        raise UserError(f"the tokenizer's chat template took more than {RENDER_S:g} s for these messages") from None
    except Exception as error:  # a template is a program and may raise anything
        name = "" if "Template" in type(error).__name__ else f"{type(error).__name__}: "
        raise UserError(
            f"the tokenizer's chat template refuses the messages: {name}{' '.join(str(error).split())[:500]}"
        ) from None
    if len(text) > RENDERED_CHARACTERS:
        raise UserError(
            f"the tokenizer's chat template makes a text of {len(text)} characters, and at most {RENDERED_CHARACTERS} are taken"
        )
    return text


def check_size(tokenizer: Any) -> None:
    """Raise UserError for a chat template that is not text or is too long."""
    template = tokenizer.chat_template
    for each in template.values() if isinstance(template, dict) else [template]:
        if each is not None and not isinstance(each, str):
            raise UserError(f"the tokenizer's chat template is no text, but {shown(each)}")
        if each is not None and len(each) > TEMPLATE_CHARACTERS:
            raise UserError(
                f"the tokenizer's chat template has {len(each)} characters, and at most {TEMPLATE_CHARACTERS} are taken"
            )


def check_template(tokenizer: Any) -> None:
    """Raise UserError for a chat template that needs too much time or memory for short conversations, or ends its process.

    It is compiled and rendered in a fork of this process with limits, because a template can allocate any amount of memory at once.
    """
    if not tokenizer.chat_template:
        return
    check_size(tokenizer)
    ours, theirs = Pipe(duplex=False)
    with ours:
        child = os.fork()
        if child == 0:
            try_template(tokenizer, theirs)
        theirs.close()
        found = b""
        with suppress(EOFError):
            found = ours.recv_bytes() if wait([ours], TRIAL_S) else b"took too long"
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not found and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            found = b"took too long"
    if found != b"rendered":
        raise UserError(
            f"the tokenizer's chat template {found.decode() or 'ended its process'} for a short conversation; copy the template that "
            "belongs to this model"
        )


def try_template(tokenizer: Any, line: Connection) -> NoReturn:
    """Render some conversations, in a fork, and send the outcome over the pipe. A template may refuse any of them."""
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, RENDER_S)
        # Jinja evaluates constants when it compiles, and swallows exceptions there; they would occur again later, without limits.
        nodes.Impossible.__init__ = lambda self, *args: line_of_memory(line)  # type: ignore[method-assign]
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        wanted = taken + TRIAL_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))
        for messages, tools in TRIALS:
            try:
                tokenizer.apply_chat_template(
                    messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
                )
            except MemoryError:
                line_of_memory(line)
            except Exception:
                continue
        line.send_bytes(b"rendered")
    finally:
        os._exit(1)


def line_of_memory(line: Connection) -> None:
    """Report, in a fork, that the current exception is a MemoryError, and exit; do nothing for any other exception."""
    if isinstance(sys.exc_info()[1], MemoryError):
        line.send_bytes(b"takes more than 1 GiB of memory")
        os._exit(0)


class RenderingWatch:
    """A thread that raises Overdue in threads whose rendering takes too long."""

    _process = 0

    def begin(self, seconds: float) -> None:
        """Watch the calling thread from now on."""
        # A fork has no threads of its parent, and its lock may be held by one of these.
        if self._process != os.getpid():
            self._lock, self._process = threading.Lock(), os.getpid()
            self._until, self._ended = dict[int, float](), set[int]()
            threading.Thread(target=self._look, daemon=True, name="rendering watch").start()
        with self._lock:
            self._until[threading.get_ident()] = time.thread_time() + seconds

    def end(self) -> None:
        """Stop watching the calling thread. Raises Overdue if it was over its limit."""
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
