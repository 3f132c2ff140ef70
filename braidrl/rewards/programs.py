"""The verifier `code`, which runs a model's program against tests. Expected results never reach the program's process.

response ──last block of code──▶ program ──a process per test──▶ its output, compared here
tests (`cases.py`) ──executed here (`assertions.py`)──▶ calls of the program's functions ──pipe (`crossing.py`)──▶
                     process of the program ──plain results──▶ rebuilt and compared here

The verifier runs in its sandbox (`reward.sandbox=bubblewrap`). The program runs in another process there, which cannot
read the verifier's memory or access its descriptors.
"""

import ast
import builtins
import contextlib
import copy
import json
import math
import operator
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

from braidrl.errors import printable
from braidrl.rewards.assertions import MODULE, TestStopped, runs
from braidrl.rewards.cases import AssertCase, CallCase, OutputCase, cases_of
from braidrl.rewards.crossing import ASKED, COMPARISONS, DOCUMENTED, OPERATORS, Foreign, Peer
from braidrl.rewards.outputs import near, same_output
from braidrl.rewards.verifiers import Score
from braidrl.sandbox.copies import PROGRAMS

BLOCK = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("", "python", "python3", "py")
DENIED = ("gaierror", "URLError", "timeout")
"""Exceptions raised without a network, beside the built-in OSErrors."""
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
LATER = 10
"""The niceness of a program relative to the processes that count it."""
OUTPUT_BYTES = 1 << 20
"""Bytes of a program's output that are compared; a program that prints more is wrong."""
WORK = "/tmp"
"""The program's folder: the call's own."""
KNOWN = sys.stdlib_module_names | {"builtins"}
COMPUTED = {*COMPARISONS.split()}.union(*((n, f"{n}_", f"i{n}") for n in OPERATORS.split()))
SPECIAL = {f"__{name}__" for name in (*ASKED.split(), *COMPARISONS.split(), "iter", "next", "hash", "call", "exit")}
"""What a program may compute with an object of a class of the test."""
START = (
    "import sys; sys.path.insert(0, {folder!r}); from crossing import main; del sys.path[0]; "
    "main({requests}, {answers})"
)
"""Starts the program's end of a conversation; the file is found beside this one, and compiled once for all."""
ANSWER_BYTES = 1 << 20
"""Bytes of an answer of a program; a longer one is wrong."""


class ProgramEnded(Exception):
    """A limit of the sandbox ended a program, or the sandbox refused an operation."""


class CannotCross(Exception):
    """A test needs a comparison that only the program itself could make."""


def code(
    response: str, answer: Any, metadata: Mapping[str, Any], *, fraction: bool = False, seconds: float = 2
) -> Score:
    """Return whether the response's program passes all tests; with `fraction` the share that it passes.

    The program is the last block of Python; a block without a language counts if none is marked as Python. The
    example's answer holds the tests, or is JSON of them: what the program reads and prints, what a function returns
    (`fn_name`), or Python's tests: asserts, functions and classes as of pytest and unittest, `check(candidate)`. Each
    test may use `seconds` of processor time (a whole number), which a busy machine does not shorten. A response without
    code is wrong. A test that asserts nothing is the row's failure. If no test passes and a limit ended one, or a value
    of the program cannot be compared, the row's check fails with that reason. Needs `reward.sandbox=bubblewrap`.
    """
    if PROGRAMS not in os.environ:
        raise PermissionError("a model's program runs in the strict sandbox alone; write sandbox=bubblewrap")
    tests, program = cases_of(answer, metadata), program_of(response)
    if not program:
        return Score(0.0, correct=False)
    passed, ended = 0, list[Exception]()
    for number, case in enumerate(tests, 1):
        try:
            if isinstance(case, OutputCase):
                with started(["-c", program], case.given, math.ceil(seconds)) as running:
                    right = same_output(running.output(), case.expected)
            else:
                right = holds(program, case, math.ceil(seconds))
        except (ProgramEnded, CannotCross) as error:
            right, ended = False, [*ended, type(error)(f"test {number}: {error}")]
        passed += right
        if not right and not fraction:
            break
    if ended and (not passed or not fraction):
        raise ended[0]
    share = passed / len(tests)
    return Score(share if fraction else float(share == 1), correct=share == 1)


def program_of(response: str) -> str:
    """Return the last block of Python code; an empty text if there is none.

    A block without a language may be a program's output, so it counts if no other is Python, and it can be a program.
    """
    blocks = [(language.lower(), textwrap.dedent(text).strip()) for language, text in BLOCK.findall(response)]
    marked = [text for language, text in blocks if language in PYTHON and language]
    bare = [text for language, text in blocks if not language]
    return next((text for text in reversed(marked or [*bare[-1:], *filter(is_program, bare)]) if text), "")


def is_program(text: str) -> bool:
    """Return True if a text is a Python program, and not a value or an output that parses as Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.For, ast.While)
    return any(isinstance(node, (*defined, ast.Call)) for node in ast.walk(tree))


def holds(program: str, case: AssertCase | CallCase, seconds: int) -> bool:
    """Run a test in this process; its calls of the program's functions run in the program's process."""
    requests, ours = os.pipe()
    theirs, answers = os.pipe()
    start = START.format(folder=os.path.dirname(__file__), requests=requests, answers=answers)
    with started(["-c", start], "", seconds, (requests, answers)) as running:
        os.close(requests)
        os.close(answers)
        with open(ours, "w") as to_program, open(theirs, "rb") as from_program:
            peer = TestPeer(running, to_program, from_program)
            try:
                try:
                    print(json.dumps([prelude_of(program, case), program]), file=to_program, flush=True)
                except BrokenPipeError:
                    peer.over()
                passed = returns(peer, case) if isinstance(case, CallCase) else runs(case, peer)
            except TestStopped as stopped:
                peer.stopped = peer.stopped or stopped
                passed = False
            # A bare `except`, or a `finally`, may have hidden it.
            if peer.stopped is not None and peer.stopped.reason is not None:
                raise peer.stopped.reason
            return passed and peer.stopped is None


TYPED = re.compile(r"\b(?:List|Dict|Set|Tuple|Optional|Union|Any|Callable|Iterable|Iterator)\b")
SOLUTIONS = (
    "import math, re, string, collections, heapq, bisect, functools, itertools, operator, random, sys\n"
    "from collections import *\nfrom heapq import *\nfrom bisect import *\nfrom functools import *\n"
    "from itertools import *\nfrom math import *\nfrom typing import *"
)
"""What the sites whose tasks ask for a class `Solution` import before a program."""


def prelude_of(program: str, case: AssertCase | CallCase) -> str:
    """Return the imports that a program may take for granted: the names of types, and a site's own."""
    if isinstance(case, CallCase) and "class Solution" in program:
        return SOLUTIONS
    return "from typing import *" if TYPED.search(program) and "typing" not in program else ""


def returns(peer: "TestPeer", case: CallCase) -> bool:
    """Return True if a function, or the method of a class `Solution`, returns the expected result.

    As JSON has neither, tuples are compared as lists; some data sets write a single result as a list of one.
    """
    try:
        try:
            function = peer.ask("name", None, case.function)
        except KeyError:
            function = getattr(peer.ask("name", None, "Solution")(), case.function)
        # The data's own arguments stay as they are, whatever the program does with them.
        result = as_lists(function(*copy.deepcopy(case.arguments)))
    except Exception:
        return False
    expected = as_lists(case.expected)
    return same_value(result, expected) or (
        isinstance(expected, list) and len(expected) == 1 and same_value(result, expected[0])
    )


def same_value(result: Any, expected: Any) -> bool:
    """Return whether two values are equal, up to the rounding of decimals."""
    if type(expected) is float and type(result) in (int, float):
        return result == expected or near(result, expected)
    if type(expected) is list and type(result) is list:
        return len(result) == len(expected) and all(map(same_value, result, expected))
    if type(expected) is dict and type(result) is dict:
        return result.keys() == expected.keys() and all(same_value(result[key], expected[key]) for key in expected)
    return bool(result == expected)


def as_lists(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [as_lists(part) for part in value]
    if type(value) is dict:
        return {str(key): as_lists(part) for key, part in value.items()}
    return value


class TestPeer(Peer):
    """The test's end of a conversation with an untrusted program."""

    def __init__(self, running: "Running", requests: Any, answers: Any) -> None:
        """Talk to a `running` program over two pipes, one line at a time."""
        super().__init__(requests, answers, 0)
        self.foreign, self.running, self.unread = ProgramValue, running, b""
        self.awaitable = KeptAwaitable
        self.stopped: TestStopped | None = None
        self.names: Mapping[str, Any] = {}
        self.printed, self.terminal = 0, sys.stdout

    def stop(self, reason: Exception | None) -> NoReturn:
        self.stopped = self.stopped or TestStopped(reason)
        raise self.stopped

    def over(self) -> NoReturn:
        """End the test of a program that has ended."""
        try:
            self.running.output()
        except ProgramEnded as error:
            self.stop(error)
        self.stop(None)

    def ask(self, verb: str, on: Any = None, name: str = "", *arguments: Any, **named: Any) -> Any:
        try:
            return super().ask(verb, on, name, *arguments, **named)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            if self.raised_by_program(error):
                raise
            self.stop(None)  # its answer is invalid
        finally:
            self.show_printed()

    def send(self, message: dict[str, Any]) -> None:
        try:
            super().send(message)
        except BrokenPipeError:
            self.over()

    def receive(self) -> dict[str, Any]:
        while b"\n" not in self.unread:
            piece = os.read(self.answers.fileno(), 1 << 16)
            if not piece:
                self.over()
            if len(self.unread) > ANSWER_BYTES:
                self.stop(None)
            self.unread += piece
        line, _, self.unread = self.unread.partition(b"\n")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise TypeError("its answer is no object")
        return answer

    def do(self, verb: str, on: Any, name: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Execute a program's request on a value of the test: call it, iterate over it, or use the public names of the
        test's classes.
        """
        if verb == "input":
            return patched_input(*arguments)
        steps = verb == "next" or (verb == "method" and name == "__iter__")
        if verb == "operator":
            allowed = name in COMPUTED and any(is_of_test(value) for value in arguments)
        elif verb == "call" or (steps and isinstance(on, Iterator)):
            allowed = True
        else:
            allowed = is_of_test(on) and (not name.startswith("_") or (verb == "method" and name in SPECIAL))
        if allowed:
            return super().do(verb, on, name, arguments, named)
        raise TypeError(f"a {type(on).__name__} of the test may only be called")

    def reference(self, value: Any) -> Any:
        """Return the reference for a value of the test; a type or function of the standard library is sent by name."""
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if isinstance(value, type | BuiltinFunctionType | FunctionType) and str(module).partition(".")[0] in KNOWN:
            loaded = sys.modules.get(str(module))
            if "." not in str(module) and getattr(loaded, name, None) is value:
                return {"standard": f"{module}.{name}"}
        return super().reference(value)

    def dataclass(self, name: str) -> Any:
        return self.names.get(name)

    def raised(self, answer: dict[str, Any]) -> BaseException:
        """Return the program's exception; end the test if the sandbox refused something, or the program exits."""
        error = super().raised(answer)
        if isinstance(error, OSError | MemoryError):
            self.stop(ProgramEnded(printable(f"{type(error).__name__}: {str(answer.get('text'))[:200]}")))
        if not isinstance(error, Exception):
            self.stop(None)
        return error

    def raised_by_program(self, error: BaseException) -> bool:
        return hasattr(error, "_foreign")

    def show_printed(self) -> None:
        """Print in a test that has replaced `sys.stdout` the program's output in the meantime."""
        if sys.stdout is not self.terminal:
            text = os.pread(self.running.out.fileno(), OUTPUT_BYTES, self.printed)
            self.printed += len(text)
            sys.stdout.write(text.decode(errors="replace"))


OWN_INPUT, OWN_STDIN = builtins.input, sys.stdin


def patched_input(size: int | None) -> str:
    """Return what a program reads, where its test has replaced `input` or `sys.stdin`. Raises EOFError at the end.

    `size` is None for a line.
    """
    if size is None and builtins.input is not OWN_INPUT:
        return f"{builtins.input()}\n"
    if sys.stdin is OWN_STDIN:
        raise EOFError("EOF when reading a line")
    return str(sys.stdin.readline() if size is None else sys.stdin.read(size))


def is_of_test(value: Any) -> bool:
    """Return whether a value is an object of a class that the test defines."""
    return type(value).__module__ == MODULE


class ProgramValue(Foreign):
    """A proxy of a value of the program.

    The program cannot influence how a test compares it.
    """

    async def __anext__(self) -> Any:
        return await self._peer.ask("method", self, "__anext__")

    def __aiter__(self) -> Any:
        return self._peer.ask("method", self, "__aiter__")

    def _plain(self) -> Any:
        """Return the plain value of a number, text or container of a subclass that compares as its base."""
        peer = object.__getattribute__(self, "_peer")
        try:
            return peer.ask("base", self)
        except TypeError:
            return self._stays()

    def _stays(self) -> NoReturn:
        peer: TestPeer = object.__getattribute__(self, "_peer")
        peer.stop(CannotCross("the test compares an object of a class of the program, whose word does not count"))

    def __contains__(self, value: Any) -> bool:
        try:
            return any(value is element or value == element for element in self)
        except TypeError:
            self._stays()

    def __hash__(self) -> int:
        self._stays()


class KeptAwaitable(ProgramValue):
    """A coroutine of the program, which is equal to itself alone, as event loops need it."""

    def __hash__(self) -> int:
        return id(self)


def comparing(name: str) -> Any:
    def compared(self: ProgramValue, other: Any) -> Any:
        if other is None and name in ("__eq__", "__ne__"):
            return name == "__ne__"
        if isinstance(other, ProgramValue):
            self._stays()
        return getattr(operator, name)(self._plain(), other)

    return compared


setattr(ProgramValue, "__doc__", DOCUMENTED)  # noqa: B010 (types know it as a text)
for _name in COMPARISONS.split():
    setattr(ProgramValue, f"__{_name}__", comparing(f"__{_name}__"))
KeptAwaitable.__eq__ = object.__eq__  # type: ignore[method-assign]


@dataclass
class Running:
    """A running program with `seconds` of processor time, its output in files of this call's folder, and its answers to
    requests.
    """

    process: "subprocess.Popen[bytes]"
    out: Any
    err: Any
    seconds: int

    def output(self) -> str | None:
        """Wait, and return the output; None if the program failed. Raises ProgramEnded if a limit ended it."""
        # A sleeping program is killed with its row, after reward.timeout_s.
        status = self.process.wait()
        if status == 0:
            self.out.seek(0)
            return str(self.out.read(OUTPUT_BYTES).decode(errors="replace"))
        self.err.seek(0)
        last = self.err.read(OUTPUT_BYTES).decode(errors="replace").strip().rpartition("\n")[2]
        if status == -signal.SIGXCPU:
            raise ProgramEnded(f"it took over {self.seconds} s of a processor")
        if status < 0:
            raise ProgramEnded(f"killed by signal {-status}")
        # The last line of a traceback names an error: of memory, files, processes or the network?
        name = last.partition(":")[0].strip().rpartition(".")[2]
        kind = getattr(builtins, name, None)
        if name in DENIED or (isinstance(kind, type) and issubclass(kind, (OSError, MemoryError))):
            raise ProgramEnded(printable(last[:200]))
        return None


@contextlib.contextmanager
def started(words: Sequence[str], text: str, seconds: int, descriptors: Sequence[int] = ()) -> Iterator[Running]:
    """Start Python with these arguments and `text` as its input; on exit kill it and its descendants.

    Its input and output are files, so that a program that prints endlessly or reads nothing cannot block this process.
    The kernel ends it after `seconds` of processor time, or at the sandbox's limit if that is lower.
    """

    def limit_processor() -> None:
        # It has lower priority than the process that counts its processes: otherwise it could start many more before
        # they are counted.
        os.nice(LATER)
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        hard = seconds + 1 if most == resource.RLIM_INFINITY else min(seconds + 1, most)
        resource.setrlimit(resource.RLIMIT_CPU, (min(seconds, hard), hard))

    with (
        tempfile.TemporaryFile("w+", dir=WORK) as stdin,
        tempfile.TemporaryFile(dir=WORK) as out,
        tempfile.TemporaryFile(dir=WORK) as err,
    ):
        stdin.write(text)
        stdin.flush()
        stdin.seek(0)
        variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-I", *words],
            stdin=stdin,
            stdout=out,
            stderr=err,
            cwd=WORK,
            start_new_session=True,
            env=variables | {"HOME": WORK, "TMPDIR": WORK},
            pass_fds=descriptors,
            preexec_fn=limit_processor,
        )
        try:
            yield Running(process, out, err, seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
