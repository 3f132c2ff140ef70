"""Programs of a model against tests: right, wrong, and whatever they do to what is around them, which is their own
row's failure.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from braidrl.config import RewardConfig
from braidrl.errors import UserError
from braidrl.rewards.cases import AssertCase, CallCase, OutputCase, cases_of
from braidrl.rewards.outputs import lines_of
from braidrl.rewards.pool import CallOutcome, RewardPool
from braidrl.rewards.programs import program_of
from braidrl.rewards.verifier import Completion, resolve
from braidrl.runtimes.prepare.setup import prepare
from tests.attacks.test_verifiers import has_walls
from tests.rewards.programs_by_form import FORMS
from tests.tiny import Workshop, write_jsonl

DOUBLE = "print(2 * int(input()))"
TESTS = {"inputs": ["1\n", "21\n"], "outputs": ["2", "42\n"]}
strict = pytest.mark.skipif(not has_walls("bubblewrap"), reason="there is no bubblewrap, or it can start nothing here")
ATTACKS = {
    "import os\nwhile True:\n    os.fork()": ("died", "more than 64 processes"),
    "held = bytearray(10 << 30)": ("exception", "MemoryError"),
    "while True:\n    pass": ("exception", "over 1 s of a processor"),
    "print(open('HOME').read())": ("exception", "FileNotFoundError"),
    "import socket\nsocket.create_connection(('127.0.0.1', PORT), 2)": ("exception", "Error"),
    "with open('/dev/shm/large', 'wb') as file:\n    for _ in range(1024):\n        file.write(bytes(1 << 20))": (
        "exception",
        "File too large",
    ),
    "import os\nwhile True:\n    os.write(1, bytes(1 << 20))": ("exception", "File too large"),
    "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)": (
        "exception",
        "No such process",
    ),
    "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', "
    "'braid-program-left'],"
    " start_new_session=True)\nopen('/none')": ("exception", "FileNotFoundError"),
}


AROUND = 4
"""Processes of a sandbox beside those of the code: bubblewrap's two, the host, and one that is starting."""


@contextmanager
def counted_processes() -> Iterator[list[int]]:
    """Count the processes below this one, some times a second."""
    counts, over = [0], threading.Event()

    def count() -> None:
        while not over.wait(0.1):
            counts.append(len(psutil.Process().children(recursive=True)))

    counting = threading.Thread(target=count)
    counting.start()
    try:
        yield counts
    finally:
        over.set()
        counting.join()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and left(before):
        time.sleep(0.05)
    assert not left(before)


def left(before: set[int]) -> set[int]:
    marked = {
        one.pid for one in psutil.process_iter(["cmdline"]) if "braid-program-left" in (one.info["cmdline"] or [])
    }
    return marked | {child.pid for child in psutil.Process().children(recursive=True)} - before


def outcomes(
    programs: list[str], answer: Any = TESTS, params: dict[str, Any] | None = None, **settings: Any
) -> list[CallOutcome]:
    verifier = resolve("code", params)
    with RewardPool(RewardConfig(**{"sandbox": "bubblewrap", "timeout_s": 30, **settings})) as pool:
        rows = [Completion("p", f"So it is\n```python\n{one}\n```\n", answer) for one in programs]
        return [future.result(600) for future in [pool.submit(row, verifier) for row in rows]]


@strict
def test_a_program_scores_by_all_tests_or_by_the_share_it_passes() -> None:
    programs = [DOUBLE, "input()\nprint(2)", "print('2' if int(input()) == 1 else 1 / 0)", "3 +"]
    assert [(one.score, one.correct) for one in outcomes(programs[:2])] == [(1.0, True), (0.0, False)]
    share = outcomes(programs, json.dumps(TESTS), {"fraction": True})
    assert [(one.score, one.correct) for one in share] == [(1.0, True), (0.5, False), (0.5, False), (0.0, False)]


@strict
def test_asserts_pass_only_if_they_hold_not_if_a_program_exits_early() -> None:
    programs = [
        "def double(x):\n    return 2 * x",
        "def double(x):\n    return x",
        "import os\nos._exit(0)",
        "raise SystemExit",
    ]
    asserts = ["assert double(1) == 2", "assert double('ab') == 'abab'"]
    assert [one.score for one in outcomes(programs, asserts)] == [1.0, 0.0, 0.0, 0.0]
    assert [one.score for one in outcomes(programs[:2], "\n".join(asserts))] == [1.0, 0.0]


def attacks(port: int, secret: Path) -> list[str]:
    return [text.replace("PORT", str(port)).replace("HOME", str(secret)) for text in ATTACKS]


@pytest.fixture
def aimed() -> Iterator[list[str]]:
    """The attacks, with a file of the home directory and a port that are there."""
    secret = Path.home() / f".braid-secret-{os.getpid()}"
    secret.write_text("hush")
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield attacks(server.getsockname()[1], secret)
    secret.unlink()


def check_attacked(found: list[CallOutcome], rounds: int) -> None:
    expected = [each for kind in ATTACKS.values() for each in (kind, (None, ""))] * rounds
    for one, (failure, detail) in zip(found, expected, strict=True):
        assert one.failure == failure and detail in one.detail, one
        assert failure or one.correct


@strict
def test_what_a_program_does_is_its_own_rows_failure_with_its_reason(aimed: list[str]) -> None:
    rows = [each for attack in aimed for each in (attack, DOUBLE)]
    check_attacked(outcomes(rows, params={"seconds": 1}, processes=2), rounds=1)


@strict
@pytest.mark.soak
def test_two_hundred_at_once(aimed: list[str]) -> None:
    rounds = -(-200 // len(aimed))
    rows = [each for attack in aimed for each in (attack, DOUBLE)] * rounds
    started = time.monotonic()
    with counted_processes() as counts:
        check_attacked(outcomes(rows, params={"seconds": 1}, processes=2), rounds)
    print(
        f"{len(rows)} rows, every second one an attack, in {time.monotonic() - started:.0f} s; at most {max(counts)} "
        "processes"
    )
    assert max(counts) <= 2 * (64 + AROUND)


@pytest.mark.parametrize("settings", [{"sandbox": "process"}, {"sandbox": "none"}, {"processes": 0}])
def test_outside_of_the_strict_sandbox_no_program_runs(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"write reward.sandbox=bubblewrap .*reward.processes=1"):
        outcomes([DOUBLE], **settings)


def test_called_by_itself_it_runs_no_program() -> None:
    with pytest.raises(PermissionError, match="in the strict sandbox alone"):
        resolve("code")({"response": f"```\n{DOUBLE}\n```", "answer": TESTS, "metadata": {}})


def test_the_last_block_of_python_is_the_program_and_an_output_behind_it_is_not() -> None:
    text = "```python\nfirst\n```\n```\nsecond\n```\n```json\n{}\n```"
    assert program_of(text) == "first" and program_of("```py\ncut off") == "cut off" and program_of("print(1)") == ""
    program = "def f():\n    return 4"
    for output in ("4", "[1, 2]", "Result: 4", "1 2", "x = 5", "Hello, you", ">>> f()\n4"):
        for language in ("python", ""):
            assert program_of(f"```{language}\n{program}\n```\ngives\n```\n{output}\n```") == program, output
    assert program_of(f"1.  ```\n    {program.replace(chr(10), chr(10) + '    ')}\n    ```") == program
    assert program_of("```\nx = 1\n```") == "x = 1"


def test_tests_are_read_in_every_form() -> None:
    two = [OutputCase("1\n", "2"), OutputCase("21\n", "42\n")]
    listed = [{"input": "1\n", "output": "2"}, {"input": "21\n", "output": "42\n"}]
    assert cases_of(TESTS) == cases_of(json.dumps(TESTS)) == cases_of(repr(TESTS)) == cases_of(listed) == two
    assert cases_of(["assert a", "assert b"]) == [AssertCase("assert a"), AssertCase("assert b")]
    assert cases_of("assert a\nassert b") == [AssertCase("assert a\nassert b")]
    called = {"fn_name": "f", "inputs": [[1], "2\n3"], "outputs": [2, "[5]"]}
    assert cases_of(repr(called)) == [CallCase("f", [1], 2), CallCase("f", [2, 3], [5])]
    assert cases_of({"test": "assert f(1)"}, {"entry_point": "f", "test_setup_code": "a = 1"}) == [
        AssertCase("a = 1\nassert f(1)", "f")
    ]
    assert lines_of("1 \n\n2\n\n") == ["1", "", "2"] != lines_of("1\n2")
    without = (
        "x = 1",
        "",
        "print",
        "assert f(",
        '{"text": "assert f(1)"}',
        {"tests": []},
        {"inputs": None, "outputs": None},
    )
    for wrong in ({"inputs": ["1"], "outputs": []}, [], [{"input": 1, "output": "2"}], "{}", *without):
        with pytest.raises(ValueError, match="test"):
            cases_of(wrong)


def both(index: int) -> dict[str, CallOutcome]:
    """Return the outcomes of the honest programs (0), or of the wrong ones (1), by form."""
    verifier = resolve("code")
    with RewardPool(RewardConfig(sandbox="bubblewrap", timeout_s=60, processes=2)) as pool:
        rows = [
            Completion("p", f"```python\n{entry[index]}\n```", entry[2], {"answer": entry[2], **entry[3]})
            for entry in FORMS.values()
        ]
        results = [future.result(600) for future in [pool.submit(row, verifier) for row in rows]]
    return dict(zip(FORMS, results, strict=True))


@strict
def test_honest_programs_score_one_with_tests_of_every_form() -> None:
    assert {name: one for name, one in both(0).items() if one.score != 1.0} == {}


@strict
def test_wrong_programs_score_nothing_with_tests_of_every_form() -> None:
    assert {name: one for name, one in both(1).items() if one.score != 0.0} == {}


NAMED = {
    "an own comparison": (
        "class P:\n    def __eq__(self, other):\n        return True\ndef f():\n    return P()",
        "assert f() == 4",
        "cannot|own|compares",
    ),
    "two objects of an own class": ("class P:\n    pass\ndef f():\n    return P()", "assert f() == P()", "compares"),
    "an own order": (
        "class P:\n    def __lt__(self, other):\n        return True\ndef f():\n    return P()",
        "assert f() < P()",
        "compares",
    ),
    "an own class as a member": ("class P:\n    pass\ndef f():\n    return P()", "assert f() in {P()}", "compares"),
    "a test without an assertion": (
        "def f():\n    return 4",
        "def helper():\n    assert f() == 4\nf()",
        "no assertion",
    ),
    "a loop over nothing": ("def f():\n    return []", "for x in f():\n    assert x == 4", "no assertion"),
    "a module that is not installed": (
        "def f():\n    return 4",
        "import nothing_like_it\nassert nothing_like_it.of(f()) == 4",
        "nothing_like_it",
    ),
    "a fixture that is not there": ("def f():\n    return 4", "def test_f(tmp):\n    assert f() == 4", "tmp"),
    "a function that judges": (
        "def f(x):\n    return 0\ndef same(a, b):\n    return True",
        "assert same(f(2), 3)",
        "same",
    ),
    "a function that judges a name": (
        "def f(x):\n    return 0\ndef same(a, b):\n    return True",
        "x = f(2)\nassert same(x, 3) is True",
        "same",
    ),
    "a function that measures": (
        "def f(x):\n    return 0\ndef error(a, b):\n    return 0",
        "assert abs(error(f(2), 3)) < 1e-6",
        "error",
    ),
    "a value that only the program has": ("def f(x):\n    return 0\nRIGHT = 0", "assert f(2) == RIGHT", "RIGHT"),
    "a function beside the one that the data name": (
        "def f(x):\n    return 0\ndef g():\n    return 0",
        "def check(candidate):\n    assert candidate(2) == RIGHT",
        "",
    ),
    "a check of several functions": (
        "def f(x):\n    return 0\ndef g():\n    return 0",
        "def check(candidate):\n    assert candidate(2) == 4",
        "entry_point",
    ),
    "a skipped test": (
        "def f():\n    return 4",
        "import pytest\n@pytest.mark.skip\ndef test_f():\n    assert f() == 4",
        "no assertion",
    ),
}
"""Programs and tests of which the check cannot tell whether they are right, and what the row's failure names."""


@strict
@pytest.mark.parametrize("fraction", [False, True])
def test_what_cannot_be_told_is_the_rows_failure_by_name(fraction: bool) -> None:
    verifier = resolve("code", {"fraction": fraction})
    with RewardPool(RewardConfig(sandbox="bubblewrap", timeout_s=60, processes=2)) as pool:
        rows = [Completion("p", f"```python\n{program}\n```", [test]) for program, test, _ in NAMED.values()]
        results = [future.result(600) for future in [pool.submit(row, verifier) for row in rows]]
    for (name, (_, _, said)), one in zip(NAMED.items(), results, strict=True):
        assert (one.failure == "exception" and re.search(said, one.detail)) or (not said and one.score == 0), (
            name,
            one,
        )


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (["def test_f():\n    f(2)"], "asserts nothing"),
        (["f(2)"], "asserts nothing"),
        ({"inputs": [], "outputs": []}, "no tests"),
        (["assert f(2 =="], "not Python"),
        ([{"question": 4}], "input"),
    ],
)
def test_data_whose_tests_are_of_no_use_are_refused_before_a_run(workshop: Workshop, answer: Any, why: str) -> None:
    good = {"prompt": "Write f.", "answer": json.dumps(["assert f(2) == 4"])}
    path = write_jsonl(workshop.folder / "code.jsonl", [good, {**good, "answer": json.dumps(answer)}])
    config = workshop.config(data={"train": str(path)}, reward={"verify": "code", "sandbox": "bubblewrap"})
    with pytest.raises(UserError, match=f"code.jsonl, line 2: .*{why}") as refused:
        prepare(config)
    assert "\n" not in str(refused.value)
