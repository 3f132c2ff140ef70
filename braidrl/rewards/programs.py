"""`code`: runs the program that a model wrote against tests, in processes of its own within the strict sandbox.

response ──last block of code──▶ program ──a process per test: its input, or its asserts──▶ passed, wrong, or ended with a reason

The verifier is called in bubblewrap (`reward.sandbox`), and the program is executed in another process there: it sees neither what is
expected nor the pipe on which the verdict goes back.
"""

import builtins
import contextlib
import json
import math
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from braidrl.rewards.verifiers import Score
from braidrl.sandbox.sandbox import STRICT

BLOCK = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("", "python", "python3", "py")
ASSERTING = """
import json, sys
program, asserts, mark = json.load(sys.stdin)
sys.stdin = open("/dev/null")
names = {"__name__": "__main__"}
exec(compile(program, "program.py", "exec"), names)
exec(compile(asserts, "tests.py", "exec"), names)
sys.stdout.flush()
print(mark)
"""
"""Says the mark, which the program is not told, after all asserts: a program that exits early has not passed."""
DENIED = ("gaierror", "URLError", "timeout")
"""What the network's absence raises beside the built-in OSErrors."""
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
LATER = 10
"""How much less urgent a program is than its supervisor."""
OUTPUT_BYTES = 1 << 20
"""How much of a program's output is compared; a program that prints more is wrong."""


class ProgramEnded(Exception):
    """A program was ended, or refused something, by the sandbox's limits."""


@dataclass(frozen=True)
class ProgramTest:
    """One test: what the program reads and has to print, or asserts about it."""

    given: str
    expected: str | None = None
    """None where `given` are asserts."""


def code(response: str, answer: Any, *, fraction: bool = False, seconds: float = 2) -> Score:
    """Return whether the last block of Python code in the response passes all tests; with `fraction` the share that it passes.

    The example's answer holds the tests, or is JSON of them: `{"inputs": [...], "outputs": [...]}`, or a list of
    `{"input": ..., "output": ...}` or of asserts, or a text of asserts. Each test has `seconds` of a processor, whole ones, which a
    busy machine does not shorten. A response without code is wrong. Where no test is passed and one was ended by a limit, that is
    the row's failure. Needs `reward.sandbox=bubblewrap`.
    """
    if STRICT not in os.environ:
        raise PermissionError("a model's program runs in the strict sandbox alone; write sandbox=bubblewrap")
    tests, program = cases_of(answer), program_of(response)
    if not program:
        return Score(0.0, correct=False)
    passed, ended = 0, ""
    for number, test in enumerate(tests, 1):
        try:
            right = passes(program, test, math.ceil(seconds))
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
    """Return the last block of Python code; nothing where there is none."""
    found = [text for language, text in BLOCK.findall(response) if language.lower() in PYTHON]
    return found[-1].strip() if found else ""


def cases_of(answer: Any) -> list[ProgramTest]:
    """Return the tests that an example's answer holds. Raises ValueError where it holds none."""
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except ValueError:
            return [ProgramTest(answer)]
    if isinstance(answer, dict) and len(answer.get("inputs", ())) == len(answer.get("outputs", ())) > 0:
        answer = [
            {"input": given, "output": out} for given, out in zip(answer["inputs"], answer["outputs"], strict=True)
        ]
    if not isinstance(answer, list) or not answer:
        raise ValueError("the reference answer holds no tests")
    return [one if isinstance(one, ProgramTest) else case_of(one) for one in answer]


def case_of(one: Any) -> ProgramTest:
    """Return one test of a list. Raises ValueError for what is none."""
    if isinstance(one, str):
        return ProgramTest(one)
    if isinstance(one, dict) and isinstance(one.get("input"), str) and isinstance(one.get("output"), str):
        return ProgramTest(one["input"], one["output"])
    raise ValueError(f"a test has a text as `input` and `output`, or is a text of asserts; this one is {str(one)[:80]}")


def passes(program: str, test: ProgramTest, seconds: int) -> bool:
    """Return whether the program passes a test. Raises ProgramEnded where a limit ended it."""
    if test.expected is not None:
        return lines_of(run([sys.executable, "-I", "-c", program], test.given, seconds)) == lines_of(test.expected)
    mark = secrets.token_hex(16)
    asked = json.dumps([program, test.given, mark])
    return lines_of(run([sys.executable, "-I", "-c", ASSERTING], asked, seconds) or "")[-1:] == [mark]


def lines_of(text: str | None) -> list[str]:
    """Return the lines of an output without the white space at their ends; empty lines at the end do not count."""
    return [] if text is None else [line.rstrip() for line in text.rstrip().split("\n")]


def run(command: Sequence[str], given: str, seconds: int) -> str | None:
    """Return what a program printed, None where it failed by itself.

    Raises ProgramEnded where it took too long, was killed, or ended by an error of memory, files, processes or the network.
    """
    # Files, so that neither a program that prints without end nor one that reads nothing blocks anybody.
    with (
        os.fdopen(os.memfd_create("in"), "w+") as stdin,
        os.fdopen(os.memfd_create("out"), "rb") as out,
        os.fdopen(os.memfd_create("err"), "rb") as err,
    ):
        stdin.write(given)
        stdin.flush()
        stdin.seek(0)
        variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        process = subprocess.Popen(
            command, stdin=stdin, stdout=out, stderr=err, cwd="/dev/shm", start_new_session=True,
            env=variables | {"HOME": "/dev/shm", "TMPDIR": "/dev/shm"},
            preexec_fn=lambda: limit_processor(seconds),
        )  # fmt: skip
        # One that sleeps is ended with its row, after reward.timeout_s.
        status = process.wait()
        end_session(process)
        if status == 0:
            out.seek(0)
            return out.read(OUTPUT_BYTES).decode(errors="replace")
        err.seek(0)
        last = err.read(OUTPUT_BYTES).decode(errors="replace").strip().rpartition("\n")[2]
    if status == -signal.SIGXCPU:
        raise ProgramEnded(f"it took over {seconds} s of a processor")
    if status < 0:
        raise ProgramEnded(f"killed by signal {-status}")
    if is_of_the_system(last):
        raise ProgramEnded(last[:200])
    return None


def limit_processor(seconds: int) -> None:
    """Have this process end after so many seconds of a processor, or by the sandbox's own limit where that is less.

    Whoever counts its processes comes before it: else one that starts many has many more before they are counted.
    """
    os.nice(LATER)
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    hard = seconds + 1 if most == resource.RLIM_INFINITY else min(seconds + 1, most)
    resource.setrlimit(resource.RLIMIT_CPU, (min(seconds, hard), hard))


def end_session(process: "subprocess.Popen[bytes]") -> None:
    """End a program and what it started, but for what has left its session, which ends with the sandbox."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def is_of_the_system(last_line: str) -> bool:
    """Return whether the last line of a traceback names an error of memory, files, processes or the network."""
    name = last_line.partition(":")[0].strip().rpartition(".")[2]
    kind = getattr(builtins, name, None)
    return name in DENIED or (isinstance(kind, type) and issubclass(kind, (OSError, MemoryError)))
