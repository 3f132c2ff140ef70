"""Attack 1: what a test expects is not in the program's process; only right results score."""

from __future__ import annotations

from typing import Any

import pytest

from braidrl.config import RewardConfig
from braidrl.rewards.pool import CallOutcome, RewardPool
from braidrl.rewards.verifier import Completion, resolve
from tests.attacks.harness import needs_walls, nothing_left

pytestmark = needs_walls
ASSERTS = ["assert double(2) == 4", "assert double('ab') == 'abab'"]
PRINTED = [{"input": "2\n", "output": "4\n"}, {"input": "21\n", "output": "42\n"}]
HONEST = "def double(x):\n    return x + x\nif __name__ == '__main__':\n    import sys\n    line = sys.stdin.readline()\n    if line:\n        print(2 * int(line))"
ASK = "import gc, os, signal, sys, json, glob\n"
# Solves the tests from a text that holds them.
SOLVE = (
    "\nimport re\nfound = dict(re.findall(r'double.(.*?). == (.*)', text)) or {json.dumps(t['input']): t['output'] for t in json.loads(text)}\n"
    "def double(x):\n    return eval(found[repr(x)])\nprint(found[json.dumps(sys.stdin.readline())])"
)
CHEATS = {
    "ends at once": "import os\nos._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "prints every marker that it can find": ASK
    + "import __main__\nprint(vars(__main__))\nfor frame in [sys._getframe()]:\n"
    "    while frame:\n        print(frame.f_locals, frame.f_globals)\n        frame = frame.f_back\nos._exit(0)",
    "reads its input again": ASK
    + "for n in range(10):\n    try:\n        os.lseek(n, 0, 0)\n        print(os.read(n, 9999))\n    except OSError:\n        pass",
    "opens its input anew": ASK
    + "text = ''.join(open(f'/proc/self/fd/{n}', errors='replace').read() for n in (0, 3, 4, 5) if os.path.isfile(f'/proc/self/fd/{n}'))"
    + SOLVE,
    "maps its input": ASK + "import mmap\ntext = mmap.mmap(0, 0, access=mmap.ACCESS_READ)[:].decode()" + SOLVE,
    "reads all files of its folders": ASK
    + "text = ''.join(open(p, errors='replace').read() for f in ('/tmp', '/dev/shm', '/var/tmp', '.')\n"
    "    for p in glob.glob(f'{f}/**', recursive=True) if os.path.isfile(p))" + SOLVE,
    "equals everything": "class Any:\n    def __eq__(self, other):\n        return True\n    __hash__ = None\ndef double(x):\n    return Any()",
    "equals everything as a number": "class Any(int):\n    def __eq__(self, other):\n        return True\ndef double(x):\n    return Any(3)",
    "equals everything as a text": "class Any(str):\n    def __eq__(self, other):\n        return True\ndef double(x):\n    return Any('no')",
    "replaces built-in functions": "import builtins\nbuiltins.all = builtins.any = builtins.isinstance = lambda *a: True\ndef double(x):\n    return x",
    "replaces its driver's functions": "import __main__\n__main__.plain = lambda *a: True\n__main__.do = lambda *a: (True, [])\ndef double(x):\n    return x",
    "answers before it is asked": ASK
    + "for n in range(3, 20):\n    try:\n        os.write(n, b'{\"value\": true}\\n' * 50)\n    except OSError:\n        pass\n"
    "def double(x):\n    return x",
    "answers nesting without end": ASK
    + "for n in range(3, 20):\n    try:\n        os.write(n, b'{\"list\": [' * 60000 + b'\\n')\n    except OSError:\n        pass\n"
    "def double(x):\n    return x",
    "reads the memory of its verifier": ASK
    + "text = b''\nfor place in glob.glob('/proc/[0-9]*/mem') + glob.glob('/proc/[0-9]*/environ'):\n"
    "    if f'/{os.getpid()}/' in place:\n        continue\n    with open(place, 'rb') as file:\n        text += file.read(1)\nprint(text)\n"
    "def double(x):\n    return {2: 4, 'ab': 'abab'}[x] if text else None",
    "reads descriptors of its verifier": ASK
    + "found = [os.path.realpath(p) for p in glob.glob(f'/proc/{os.getppid()}/fd/*')]\nassert found\n"
    "def double(x):\n    return x",
    "traces its verifier": ASK
    + "import ctypes\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0\ndef double(x):\n    return x",
    "kills its verifier": ASK + "os.kill(os.getppid(), signal.SIGKILL)",
    "leaves a module for its next test": "open('/tmp/json.py', 'w').write('loads = dumps = lambda *a, **k: True')\ndef double(x):\n    return x",
    "leaves a module for other rows": "import os\nfor folder in ('/tmp', '/dev/shm', '/var/tmp', os.path.expanduser('~'), '/dev', '.'):\n    try:\n"
    "        open(f'{folder}/left.py', 'w').write('double = lambda x: x + x')\n    except OSError:\n        pass",
    "imports the module of another row": "import os, sys\nsys.path[:0] = ('/tmp', '/dev/shm', '/var/tmp', os.path.expanduser('~'), '/dev', '.')\n"
    "from left import double\nprint(double(int(input())))",
    "raises what stops a test": "def double(x):\n    raise StopIteration\nclass AssertionError(Exception):\n    pass",
    "returns a generator of itself": "def double(x):\n    while True:\n        yield double(x)",
}


def scores(programs: list[str], answer: Any, **settings: Any) -> list[CallOutcome]:
    verifier = resolve("code")
    with RewardPool(RewardConfig(**{"sandbox": "bubblewrap", "timeout_s": 20, "processes": 2, **settings})) as pool:
        rows = [Completion("p", f"```python\n{one}\n```", answer) for one in programs]
        return [future.result(600) for future in [pool.submit(row, verifier) for row in rows]]


@pytest.mark.parametrize("answer", [ASSERTS, "\n".join(ASSERTS), PRINTED], ids=["asserts", "one text", "printed"])
def test_no_cheat_scores_and_the_honest_program_does(answer: Any) -> None:
    with nothing_left():
        honest, *cheats = scores([HONEST, *CHEATS.values()], answer)
    assert honest.score == 1.0, honest
    for name, one in zip(CHEATS, cheats, strict=True):
        assert one.failure is not None or one.score == 0.0, (name, one)


def test_tests_of_every_usual_form_are_passed_by_what_holds() -> None:
    program = (
        "import math\nclass Stack:\n    def __init__(self):\n        self.held = []\n    def push(self, x):\n        self.held.append(x)\n        return self\n"
        "    def pop(self):\n        return self.held.pop()\n    def __len__(self):\n        return len(self.held)\n    def __repr__(self):\n        return f'Stack({self.held})'\n"
        "def root(x):\n    if x < 0:\n        raise ValueError('negative')\n    return math.sqrt(x)\ndef sort(xs):\n    xs.sort()\n"
        "def pairs():\n    yield from [(1, 'a'), (2, 'b')]\ndef big():\n    return 10**50, {(1, 2): {3}}, b'x', None"
    )
    tests = (
        "import math\nassert math.isclose(root(2), 1.41421356, abs_tol=1e-6)\nxs = [3, 1, 2]\nsort(xs)\nassert xs == [1, 2, 3]\n"
        "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.pop() == 2 and str(s) == 'Stack([1])' and s.held == [1]\n"
        "try:\n    root(-1)\n    assert False\nexcept ValueError as error:\n    assert 'negative' in str(error)\n"
        "assert list(pairs()) == [(1, 'a'), (2, 'b')]\nassert big() == (10**50, {(1, 2): {3}}, b'x', None)\n"
        "def check(candidate):\n    for n in range(3):\n        assert candidate(n * n) == n\ncheck(root)\n"
    )
    (found,) = scores([program], tests)
    assert found.score == 1.0, found


def test_without_walls_programs_run_only_where_the_user_insists() -> None:
    insisting = {"sandbox": "process", "run_programs_without_walls": True}
    assert scores([HONEST], ASSERTS, **insisting)[0].score == 1.0
