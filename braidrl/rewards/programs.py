"""The verifier `code`, which runs a model's program against tests. Expected results never reach the program's process.

response ──last block of code──▶ program ──a process per test──▶ its output, compared here
tests ──executed here; calls of the program's functions ──pipe──▶ process of the program ──plain results─▶ compared here

The verifier runs in its sandbox (`reward.sandbox=bubblewrap`). The program runs in another process there, which can
neither read the verifier's memory nor see its descriptors.
"""

import ast
import builtins
import contextlib
import importlib
import inspect
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from braidrl.rewards.verifiers import Score
from braidrl.sandbox.answers import printable
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
DRIVER = """
import json, os, sys
requests, answers = os.fdopen({requests}, "r"), os.fdopen({answers}, "w")
names, kept = {{"__name__": "__main__"}}, []

{codec}

def keep(value):
    kept.append(value)
    return len(kept) - 1

def do(verb, on, name, positional, named):
    if verb == "name":
        return names[name], []
    thing = kept[on]
    if verb == "attribute":
        return getattr(thing, name), []
    if verb == "truth":
        return bool(thing), []
    given = [decoded(one, kept.__getitem__) for one in positional]
    by_name = {{key: decoded(one, kept.__getitem__) for key, one in named.items()}}
    return (thing(*given, **by_name) if verb == "call" else getattr(thing, name)(*given)), given

exec(compile(json.loads(requests.readline()), "program.py", "exec"), names)
while line := requests.readline():
    try:
        value, given = do(*json.loads(line))
        given = [encoded(one, keep) if type(one) in (list, dict, set) else None for one in given]
        said = {{"value": encoded(value, keep), "given": given}}
    except BaseException as error:
        said = {{"error": type(error).__name__, "text": str(error)[:200]}}
    sys.stdout.flush()
    answers.write(json.dumps(said) + "\\n")
    answers.flush()
"""
"""Runs in the program's process: executes the program, then calls its functions and reads its values as asked."""


class ProgramEnded(Exception):
    """The sandbox's limits ended a program, or refused it something."""


class WrongProgram(Exception):
    """A program does not meet a test's requirements."""


def code(response: str, answer: Any, *, fraction: bool = False, seconds: float = 2) -> Score:
    """Return whether the last block of Python code in the response passes all tests; with `fraction` the share that it
    passes.

    The example's answer holds the tests, or is JSON of them: `{"inputs": [...], "outputs": [...]}`, or a list of
    `{"input": ..., "output": ...}` or of asserts, or a text of asserts. Each test may use `seconds` of processor time
    (a whole number), which a busy machine does not shorten. A response without code is wrong. If no test passes and a
    limit ended one, the row's check fails with that reason. Needs `reward.sandbox=bubblewrap`.
    """
    if PROGRAMS not in os.environ:
        raise PermissionError("a model's program runs in the strict sandbox alone; write sandbox=bubblewrap")
    tests, program = cases_of(answer), program_of(response)
    if not program:
        return Score(0.0, correct=False)
    passed, ended = 0, ""
    for number, (given, expected) in enumerate(tests, 1):
        try:
            if expected is None:
                right = asserts_hold(program, given, math.ceil(seconds))
            else:
                with started(["-c", program], given, math.ceil(seconds)) as running:
                    right = lines_of(running.output()) == lines_of(expected)
        except ProgramEnded as error:
            right, ended = False, ended or f"test {number}: {error}"
        passed += right
        if not right and not fraction:
            break
    if ended and (not passed or not fraction):
        raise ProgramEnded(ended)
    share = passed / len(tests)
    return Score(share if fraction else float(share == 1), correct=share == 1)


def program_of(response: str) -> str:
    """Return the last block of Python code; an empty text if there is none."""
    found = [text for language, text in BLOCK.findall(response) if language.lower() in PYTHON]
    return found[-1].strip() if found else ""


def cases_of(answer: Any) -> list[tuple[str, str | None]]:
    """Return the tests in an answer: each a program's input and output, or asserts and None.

    Raises ValueError if there are none.
    """
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except ValueError:
            return [(answer, None)]
    if isinstance(answer, dict) and len(answer.get("inputs", ())) == len(answer.get("outputs", ())) > 0:
        answer = [{"input": one, "output": out} for one, out in zip(answer["inputs"], answer["outputs"], strict=True)]
    if not isinstance(answer, list) or not answer:
        raise ValueError("the reference answer holds no tests")
    tests = list[tuple[str, str | None]]()
    for one in answer:
        if isinstance(one, str):
            tests.append((one, None))
        elif isinstance(one, dict) and isinstance(one.get("input"), str) and isinstance(one.get("output"), str):
            tests.append((one["input"], one["output"]))
        else:
            raise ValueError(f"a test has texts as `input` and `output`, or is a text of asserts, not {str(one)[:80]}")
    return tests


def lines_of(text: str | None) -> list[str]:
    """Return the lines of an output without trailing white space and without empty lines at the end."""
    return [] if text is None else [line.rstrip() for line in text.rstrip().split("\n")]


def encoded(value, keep, depth=0):  # type: ignore[no-untyped-def]
    """Encode a plain value for the pipe, in either process; any other value is what `keep` makes of it, a number."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return {"int": hex(value)}
    if kind is bytes:
        return {"bytes": value.hex()}
    if depth < 40 and kind in (list, tuple, set, frozenset):
        return {kind.__name__: [encoded(part, keep, depth + 1) for part in value]}
    if depth < 40 and kind is dict:
        return {
            "dict": [[encoded(key, keep, depth + 1), encoded(part, keep, depth + 1)] for key, part in value.items()]
        }
    return {"kept": keep(value)}


def decoded(sent, kept, depth=0):  # type: ignore[no-untyped-def]
    """Decode a value from the pipe; `kept` returns the value of a number. Raises ValueError or TypeError for anything
    else.
    """
    if sent is None or isinstance(sent, bool | float | str):
        return sent
    ((kind, parts),) = sent.items() if depth < 42 and isinstance(sent, dict) else ()
    if kind == "int":
        return int(parts, 16)
    if kind == "bytes":
        return bytes.fromhex(parts)
    if kind == "kept":
        return kept(int(parts))
    if kind == "dict":
        return {decoded(key, kept, depth + 1): decoded(part, kept, depth + 1) for key, part in parts}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](
        decoded(part, kept, depth + 1) for part in parts
    )


def asserts_hold(program: str, asserts: str, seconds: int) -> bool:
    """Execute a text of asserts in this process; names that it does not define refer to the program in its own process.

    Built-in functions and standard modules are this process's own: a program cannot replace `sorted` or `math`.
    """
    requests, ours = os.pipe()
    theirs, answers = os.pipe()
    codec = "\n".join(map(inspect.getsource, (encoded, decoded)))
    driver = DRIVER.format(requests=requests, answers=answers, codec=codec)
    with started(["-c", driver], "", seconds, (requests, answers)) as running:
        os.close(requests)
        os.close(answers)
        with open(ours, "w") as asked, open(theirs, "rb") as answered:
            try:
                print(json.dumps(program), file=asked, flush=True)
                tree = ast.parse(asserts, "tests.py")
                # Tests may use standard modules, as in `math.isclose`, even if the program has not imported them.
                used = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute))
                named = {node.id for node in used if isinstance(node, ast.Name)}
                modules = {name: importlib.import_module(name) for name in named & sys.stdlib_module_names}
                names = Names(modules, __name__="tests", __builtins__=dict(vars(builtins)))
                running.asked, running.answered = asked, answered
                names.program = running
                exec(compile(tree, "tests.py", "exec"), names)
                return True
            except (ProgramEnded, MemoryError):
                raise
            except BrokenPipeError:
                running.output()
                return False
            except Exception:
                return False


class Names(dict[str, Any]):
    """The names in a test: its own, Python's, and those of `program`."""

    program: "Running"

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        try:
            return self.program.ask("name", None, name)
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None


@dataclass
class Running:
    """A running program with `seconds` of processor time, its output in files of this call's own folder, and its
    answers to requests.
    """

    process: "subprocess.Popen[bytes]"
    out: Any
    err: Any
    seconds: int
    asked: Any = None
    answered: Any = None
    """This process's ends of the pipes for requests and plain answers, one at a time, if the program is asked."""
    unread: bytes = b""

    def output(self) -> str | None:
        """Wait, and return the output; None if the program failed by itself. Raises ProgramEnded if a limit or the
        sandbox ended it.
        """
        # A sleeping program is ended with its row, after reward.timeout_s.
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

    def ask(self, verb: str, on: int | None, name: str, *positional: Any, **named: Any) -> Any:
        """Return a request's plain result, or a `Kept` that stands for a value that is not plain; raise the program's
        exception.
        """
        by_name = {key: encoded(one, number_of) for key, one in named.items()}
        request = [verb, on, name, [encoded(one, number_of) for one in positional], by_name]
        print(json.dumps(request), file=self.asked, flush=True)
        while b"\n" not in self.unread:
            piece = os.read(self.answered.fileno(), 1 << 16)
            if not piece or len(self.unread) > OUTPUT_BYTES:
                self.output()
                raise WrongProgram("it ended before it answered")
            self.unread += piece
        line, _, self.unread = self.unread.partition(b"\n")
        try:
            said = json.loads(line)
            value = decoded(said.get("value"), partial(Kept, self))
            given = [decoded(one, partial(Kept, self)) for one in said.get("given") or ()]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise WrongProgram("its answer is not plain data") from None
        if "error" in said:
            kind, text = getattr(builtins, str(said["error"]), None), str(said.get("text"))[:200]
            if isinstance(kind, type) and issubclass(kind, (OSError, MemoryError)):
                raise ProgramEnded(printable(f"{kind.__name__}: {text}"))
            raise (kind(text) if isinstance(kind, type) and issubclass(kind, Exception) else WrongProgram(text))
        for mine, changed in zip(positional, given, strict=False):
            if isinstance(mine, list) and isinstance(changed, list):
                mine[:] = changed
            elif isinstance(mine, dict | set) and type(mine) is type(changed):
                mine.clear()
                mine.update(changed)
        return value


def number_of(value: Any) -> int:
    """Return the number of one of the program's values. Raises TypeError for a value of the test that is not plain."""
    if not isinstance(value, Kept):
        raise TypeError(f"a test gives the program plain values; a {type(value).__name__} cannot cross to its process")
    return int(object.__getattribute__(value, "_number"))


class Kept:
    """A value of the program that is not plain. It equals only itself: the program cannot influence a comparison."""

    def __init__(self, program: Running, number: int) -> None:
        """Name the value by its `number` in the program's process."""
        self._program, self._number = program, number

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._program.ask("call", self._number, "", *positional, **named)

    def __getattr__(self, name: str) -> Any:
        return self._program.ask("attribute", self._number, name)

    def _method(self, name: str, kind: type, *positional: Any) -> Any:
        try:
            found = self._program.ask("method", self._number, name, *positional)
        except AttributeError as error:  # Python raises TypeError for missing special methods
            raise TypeError(str(error)) from None
        if type(found) is not kind:
            raise WrongProgram(f"{name} returned a {type(found).__name__}")
        return found

    def __bool__(self) -> bool:
        return self._program.ask("truth", self._number, "") is True

    def __len__(self) -> int:
        return int(self._method("__len__", int))

    def __str__(self) -> str:
        return str(self._method("__str__", str))

    def __repr__(self) -> str:
        return str(self._method("__repr__", str))

    def __getitem__(self, place: Any) -> Any:
        return self._program.ask("method", self._number, "__getitem__", place)

    def __setitem__(self, place: Any, value: Any) -> None:
        self._program.ask("method", self._number, "__setitem__", place, value)

    def __contains__(self, value: Any) -> bool:
        return bool(self._method("__contains__", bool, value))

    def __iter__(self) -> Iterator[Any]:
        steps = self._program.ask("method", self._number, "__iter__")
        while True:
            try:
                yield self._program.ask("attribute", steps._number, "__next__")()
            except StopIteration:
                return


@contextlib.contextmanager
def started(words: Sequence[str], given: str, seconds: int, descriptors: Sequence[int] = ()) -> Iterator[Running]:
    """Start Python with these arguments and `given` as its input; on exit kill it and the processes that it started.

    Its input and output are files, so a program that prints endlessly or reads nothing cannot block this process. The
    kernel ends it after `seconds` of processor time, or at the sandbox's own limit if that is lower.
    """

    def limit_processor() -> None:
        # It gives way to the process that counts its processes: otherwise it could start many more before they are
        # counted.
        os.nice(LATER)
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        hard = seconds + 1 if most == resource.RLIM_INFINITY else min(seconds + 1, most)
        resource.setrlimit(resource.RLIMIT_CPU, (min(seconds, hard), hard))

    with (
        tempfile.TemporaryFile("w+", dir=WORK) as stdin,
        tempfile.TemporaryFile(dir=WORK) as out,
        tempfile.TemporaryFile(dir=WORK) as err,
    ):
        stdin.write(given)
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
