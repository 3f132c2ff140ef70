"""Attack 7: what comes out of a sandbox is plain, bounded data, or its row's failure; control characters are shown."""

from __future__ import annotations

import math

import pytest

from braidrl.agents.sandboxed import observation_of
from braidrl.agents.turns import EnvironmentFailed
from braidrl.errors import printable
from braidrl.parsing import MOST_LEVELS
from braidrl.rewards.pool import MOST_METRICS, CallOutcome
from braidrl.sandbox.answers import checked_answer
from tests.attacks.harness import TRIES, lost, made, needs_walls

WRITE = "import os, json\n"
# Answers that the code itself writes to the connection of its call, in place of what Braid would.
FORGED = WRITE + (
    "for n in range(3, 64):\n    try:\n        if 'socket:' in os.readlink(f'/proc/self/fd/{{n}}'):\n            os.write(n, ({text}).encode('utf-8', 'surrogatepass') + b'\\n')\n"
    "    except OSError:\n        pass\nos._exit(0)"
)
ANSWERS = {
    "nested 988 deep": "'[' * 988 + ']' * 988",
    "nested 990 deep inside of an answer": "'{\"score\": ' + '[' * 990 + ']' * 990 + '}'",
    "nested 100,000 deep": "'[' * 100000",
    "a metric of 10**400": "'{\"score\": 1.0, \"metrics\": {\"a\": 1' + '0' * 400 + '}}'",
    "a metric that is not finite": '\'{"score": 1.0, "metrics": {"a": NaN}}\'',
    "a score of 1e999": "'{\"score\": 1e999}'",
    "a score of minus infinity": "'{\"score\": -Infinity}'",
    "a name with a surrogate": '\'{"score": 1.0, "metrics": {"\\\\ud800": 1.0}}\'',
    "bytes that are not Unicode": '\'{"score": 1.0, "metrics": {"\\ud800": 1.0}}\'',
    "a name with an escape sequence": '\'{"score": 1.0, "metrics": {"\\\\u001b[2J": 1.0}}\'',
    "a name of 10,000 letters": "'{\"score\": 1.0, \"metrics\": {\"' + 'a' * 10000 + '\": 1.0}}'",
    "a thousand metrics": "json.dumps({'score': 1.0, 'metrics': {str(n): 1.0 for n in range(1000)}})",
    "metrics that are texts": '\'{"score": 1.0, "metrics": {"a": "much"}}\'',
    "metrics that are a list": '\'{"score": 1.0, "metrics": [1.0]}\'',
    "a score that is a text": '\'{"score": "1"}\'',
    "a list": "'[1.0]'",
    "nothing": "''",
    "a failure that is none": '\'{"failure": ["x"], "again": true}\'',
    "a megabyte": "'{\"score\": 1.0, \"a\": \"' + 'x' * (1 << 20) + '\"}'",
}
RIGHT = '{"score": 1.0, "correct": true, "reward": 1.0, "done": true}\n'
WRITER = (
    "import os, subprocess, sys\nrun = [sys.executable, '-c', 'import os, sys\\nfor n in range(3, 60):\\n    try:\\n"
    "        os.write(n, sys.argv[1].encode())\\n    except OSError:\\n        pass', RIGHT]\n"
).replace("RIGHT", repr(RIGHT))
ANSWERED_BY_PROGRAMS = {
    "by the shell": WRITER + "import shlex\nos.system(shlex.join(run))",
    "by a child of its own": WRITER + "subprocess.run(run, close_fds=False)",
    "by an interpreter that inherits all": WRITER + "os.spawnv(os.P_WAIT, run[0], run)",
    "by a fork": WRITER
    + "sys.argv = run[2:]\nif os.fork() == 0:\n    exec(run[2])\n    won = True\nelse:\n    os.wait()",
}
"""Programs that a verifier starts, and that write a right answer to each descriptor that they have."""
RETURNED = {
    "a metric of 10**400": "answer = Score(1.0, metrics={'a': 10**400})",
    "a metric whose name is a surrogate": "answer = Score(1.0, metrics={'\\ud800': 1.0})",
    "a metric whose name is an escape": "answer = Score(1.0, metrics={'\\x1b[2J': 1.0})",
    "metrics in metrics": "answer = Score(1.0, metrics={'a': {'b': 1.0}})",
    "a score beyond floats": "answer = 10**400",
    "a nested list": "answer = []\nfor _ in range(989):\n    answer = [answer]",
    "a value that refuses to be shown": "class Bad:\n    def __repr__(self):\n        raise RuntimeError('no')\nanswer = Bad()",
}


@needs_walls
@pytest.mark.parametrize("mode", ["process", "bubblewrap"])
def test_a_program_that_a_verifier_starts_does_not_answer_for_it(mode: str) -> None:
    for name, one in zip(ANSWERED_BY_PROGRAMS, made([*ANSWERED_BY_PROGRAMS.values()], mode), strict=True):
        assert (one.failure, one.correct) == (None, False), (name, one)


@needs_walls
@pytest.mark.parametrize("mode", ["process", "bubblewrap"])
def test_a_forged_answer_is_its_own_rows_failure(mode: str) -> None:
    plain = "'{\"score\": 0.25}'"
    reached, *outcome = made([FORGED.format(text=text) for text in (plain, *ANSWERS.values())], mode)
    assert reached.score == 0.25, "what the code writes itself is read"
    for name, one in zip(ANSWERS, outcome, strict=True):
        assert one.failure == "result", (name, one)


@needs_walls
@pytest.mark.parametrize("mode", ["none", "process", "bubblewrap"])
def test_a_returned_value_that_is_not_plain_is_its_own_rows_failure(mode: str) -> None:
    *outcome, good = made([*RETURNED.values(), "answer = Score(0.5, metrics={'a/b-c.d': 2.0})"], mode, "answers")
    for name, one in zip(RETURNED, outcome, strict=True):
        assert one.failure in ("result", "exception", "died"), (name, one)
    assert (good.score, dict(good.metrics)) == (0.5, {"a/b-c.d": 2.0})


ESCAPES = {
    "in an exception": "raise ValueError('\\x1b[2J\\x07\\u202e\\r gone')",
    "in a printed text": "print('\\x1b]0;title\\x07 printed')\nwon = True",
    "in raw bytes": "import os\nos.write(2, b'\\x1b[31m\\x9b1m raw \\xff')\nwon = True",
    "in the name of an exception": "class Own(Exception):\n    pass\nOwn.__name__ = 'Own\\x1b[1m'\nraise Own('x')",
}


@needs_walls
def test_escape_sequences_reach_neither_messages_nor_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    outcomes = made([*ESCAPES.values()])
    output = capfd.readouterr()
    for text in (*(one.detail for one in outcomes), output.out, output.err):
        assert printable(text, keep="\n\t") == text, repr(text)
    assert "\\x1b[2J" in outcomes[0].detail and "\\x1b]0;title" in output.err


@pytest.mark.parametrize(
    "line",
    [
        b'{"score": 1, "a": ' + b"[" * (MOST_LEVELS + 2) + b"]" * (MOST_LEVELS + 2) + b"}",
        b"1" + b"0" * 400,
        b'{"score": 1e400}',
        b'{"score": NaN}',
        b'{"score": 1, "a": ' + b"9" * 5000 + b"}",
        b'{"score": 1, "a": "\\ud800"}',
        b'{"score": 1, "\\ud800": 1}',
        b"{",
        b"\xff",
        b"",
    ],
)
def test_what_is_not_plain_is_refused(line: bytes) -> None:
    assert checked_answer(line)["failure"] == "result"


def test_plain_data_stays_as_it_is() -> None:
    assert checked_answer(b'{"a": [1, 2.5, null, true, "\\u00e9"]}') == {"a": [1, 2.5, None, True, "é"]}
    assert CallOutcome.of({"score": 1, "metrics": {"a": 1, "b.c/d": 0.5}}, 2.0).metrics == {"a": 1.0, "b.c/d": 0.5}
    for metrics in ({str(n): 1 for n in range(MOST_METRICS + 1)}, {"\n": 1}, {"a": "1"}, {"a": 3}, [1]):
        assert CallOutcome.of({"score": 1, "metrics": metrics}, 2.0).failure == "result"
    for answer in ({"score": 10**400}, {"score": 1, "metrics": {"a": 10**400}}):
        assert CallOutcome.of(answer, math.inf).failure == "result"


@pytest.mark.parametrize("reward", ["1e999", "-1" + "0" * 400, "NaN", '"1"', "[[1]]"])
def test_an_environments_answer_is_held_to_the_same(reward: str) -> None:
    answer = checked_answer(f'{{"said": "a", "reward": {reward}, "done": true, "restart": false}}'.encode())
    if "failure" not in answer:
        with pytest.raises(EnvironmentFailed):
            observation_of(answer)


ASYNC = {
    "reads the run's environment": "import os, glob\nseen = str(dict(os.environ))\nfor p in glob.glob('/proc/[0-9]*/environ'):\n    try:\n        seen += open(p).read()\n"
    "    except OSError:\n        pass\nwon = 'hush' in seen",
    "kills the run": "import os, signal\nos.kill(at.run, signal.SIGKILL)\nwon = True",
    "kills all": "import os, signal\nos.kill(-1, signal.SIGKILL)\nwon = True",
    "writes its code": "open(at.code, 'a').write('#')\nwon = True",
    "changes the rewards of other rows": "import braidrl.rewards.verifier as worker\nworker.judgement = lambda value: {'score': 1.0, 'correct': True}\nwon = False",
    "reads the environment that a parent keeps": "import os\nseen = ''\nfor p in (1, os.getppid(), at.run):\n    for name in ('environ', 'cmdline', 'auxv', 'stack'):\n        try:\n"
    "            seen += open(f'/proc/{p}/{name}', errors='replace').read()\n        except OSError:\n            pass\nwon = 'hush' in seen",
    "reads the environment in the memory of the run": "import ctypes, os\nlibc, held = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(64)\n"
    "class Part(ctypes.Structure):\n    _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
    "mine = Part(ctypes.addressof(held), 64)\nwon = libc.process_vm_readv(at.run, ctypes.byref(mine), 1, ctypes.byref(mine), 1, 0) > 0 or os.path.exists(f'/proc/{at.run}/mem')",
    "stops the run": "import os, signal\nfor p in (at.run, os.getppid()):\n    if p > 0:\n        os.kill(p, signal.SIGSTOP)\nwon = os.getppid() != 0",
    "kills the run by its group": "import os, signal\nos.killpg(at.run, signal.SIGKILL)\nwon = True",
    "limits the run": "import resource\nresource.prlimit(at.run, resource.RLIMIT_CPU, (1, 1))\nwon = True",
    "changes the event loop of other rows": "import asyncio\nasyncio.Task = asyncio.Runner = asyncio.run = None\n"
    "asyncio.events._get_running_loop = lambda: None\nwon = False",
    "changes the verifier of other rows": "import gc, types\nfor one in gc.get_objects():\n    if isinstance(one, types.FunctionType) and one.__name__ in ('tried', 'tried_async'):\n"
    "        one.__code__ = (lambda response, metadata: True).__code__\nwon = False",
    "changes JSON": "import json\njson.loads = json.dumps = lambda *a, **k: {'check': {}}\nwon = False",
}


@needs_walls
@pytest.mark.parametrize("mode", ["process", "bubblewrap"])
@pytest.mark.parametrize("function", ["tried", "tried_async"])
def test_async_verifiers_have_the_same_walls(function: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack 6."""
    import os

    monkeypatch.setenv("AWS_SECRET", "hush")
    rows = [row for attack in ASYNC.values() for row in (attack, "won = False", "won = True")]
    outcomes = made(rows, mode, function, at={"run": os.getpid(), "code": TRIES})
    for place, name in enumerate(ASYNC):
        attack, wrong, right = outcomes[3 * place : 3 * place + 3]
        assert lost(attack) or name.startswith("changes"), (name, attack)
        assert (wrong.correct, right.correct) == (False, True), (name, wrong, right)
