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


FORGED = {
    "contains everything": (
        "class Any:\n    def __contains__(self, x):\n        return True\ndef f(x):\n    return Any()",
        "assert 4 in f(2)",
    ),
    "is a member of everything": (
        "class Any:\n    def __eq__(self, x):\n        return True\n    def __hash__(self):\n        return hash(4)\ndef f(x):\n    return Any()",
        "assert f(2) in {4}",
    ),
    "is less than everything": (
        "class Any(int):\n    def __lt__(self, x):\n        return True\ndef f(x):\n    return Any(9)",
        "assert f(2) < 5",
    ),
    "is a list that equals everything": (
        "class Any(list):\n    def __eq__(self, x):\n        return True\ndef f(x):\n    return [Any()]",
        "assert f(2) == [[4]]",
    ),
    "is a counter that equals everything": (
        "from collections import Counter\nclass Any(Counter):\n    def __eq__(self, x):\n        return True\ndef f(x):\n    return Any()",
        "from collections import Counter\nassert f(2) == Counter('a')",
    ),
    "has the name of a standard class": (
        "class Fraction:\n    numerator = denominator = 1\n    def __eq__(self, x):\n        return True\nFraction.__module__ = 'fractions'\ndef f(x):\n    return Fraction()",
        "from fractions import Fraction\nassert f(2) == Fraction(1, 2)",
    ),
    "is an array of the verifier's memory": (
        "class Any:\n    __array_interface__ = {'shape': (1,), 'typestr': '<i8', 'data': (4194304, False), 'version': 3}\n    def __array__(self, *a, **k):\n        import numpy\n        return numpy.array([4])\ndef f(x):\n    return Any()",
        "import numpy as np\nassert np.array_equal(f(2), [4, 5])",
    ),
    "decides for numpy": (
        "class Any:\n    def __array_function__(self, *a, **k):\n        return True\n    def __array_ufunc__(self, *a, **k):\n        return True\ndef f(x):\n    return Any()",
        "import numpy as np\nassert np.allclose(f(2), 4)\nassert np.equal(f(2), 4)",
    ),
    "reads the names of a test's function": (
        "def f(g):\n    return g.__globals__['EXPECTED']",
        "EXPECTED = 4\nassert f(lambda x: x) == EXPECTED",
    ),
    "reads the frame of a test's generator": (
        "def f(g):\n    return g.gi_frame.f_globals['EXPECTED']",
        "EXPECTED = 4\nassert f(x for x in [1]) == EXPECTED",
    ),
    "reads the class of a test's object": (
        "def f(o):\n    return o.__class__.__init__.__globals__['EXPECTED']",
        "EXPECTED = 4\nclass A:\n    def __init__(self):\n        pass\nassert f(A()) == EXPECTED",
    ),
    "computes with a test's object": (
        "import sys\ndef f(o):\n    peer = sys.modules['crossing'].Foreign\n    p = object.__getattribute__(o, '_peer')\n    g = p.ask('operator', None, 'attrgetter', '__init__.__globals__')\n    return p.ask('call', g, '', o)['EXPECTED']",
        "EXPECTED = 4\nclass A:\n    def __init__(self):\n        pass\nassert f(A()) == EXPECTED",
    ),
    "reads a test's object that it was not given": (
        "import sys\ndef f(g):\n    p = object.__getattribute__(g, '_peer')\n    return p.ask('attribute', g, 'func_globals') or p.ask('set', g, 'x', 1)",
        "assert f(lambda x: x) == 4",
    ),
    "exits where a test expects an exception": (
        "import os\ndef f(x):\n    os._exit(0)",
        "import pytest\ndef test_f():\n    with pytest.raises(Exception):\n        f(2)",
    ),
    "raises SystemExit where a test expects an exception": (
        "def f(x):\n    raise SystemExit(0)",
        "try:\n    f(2)\nexcept BaseException:\n    pass\nassert True",
    ),
    "raises what skips a test": (
        "import unittest\ndef f(x):\n    raise unittest.SkipTest('no')",
        "def test_f():\n    assert f(2) == 4",
    ),
    "defines what is close": (
        "def isclose(*a, **k):\n    return True\ndef f(x):\n    return 9",
        "assert isclose(f(2), 4)",
    ),
    "defines numpy": (
        "class np:\n    allclose = isclose = array_equal = staticmethod(lambda *a, **k: True)\ndef f(x):\n    return 9",
        "assert np.allclose(f(2), 4)",
    ),
    "defines sorted": ("def sorted(*a):\n    return 4\ndef f(x):\n    return 9", "assert sorted(f(2)) == 4"),
    "defines the test's assertion": (
        "def assert_equal(*a):\n    pass\ndef f(x):\n    return 9",
        "assert_equal(f(2), 4)",
    ),
    "replaces pytest and unittest": (
        "import sys\nsys.modules['pytest'] = sys.modules['unittest'] = sys\ndef f(x):\n    return 9",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(2), 4)",
    ),
    "returns nothing to go through": ("def f(x):\n    return []", "for x in f(2):\n    assert x == 4"),
    "answers with a value for its name": (
        'import os\nfor n in range(3, 20):\n    try:\n        os.write(n, b\'{"value": {"standard": "builtins.object"}}\\n{"value": 4}\\n\' * 9)\n    except OSError:\n        pass\ndef f(x):\n    return x',
        "def test_f():\n    assert f(2) == 5",
    ),
    "changes what it was given": (
        "def f(xs):\n    xs.clear()\n    return 0",
        "xs = [1, 2]\ny = f(xs)\nassert y == 3 or xs == [2, 1]",
    ),
    "changes a list that it was not given": (
        "import gc\ndef f(x):\n    peer, = (o for o in gc.get_objects() if type(o).__name__ == 'ProgramPeer')\n"
        "    peer.send({'changed': [[number, {'list': [4]}] for number in (0, 2, 1)], 'value': 4})\n    return 4",
        "EXPECTED = [9]\nassert f([2]) == EXPECTED or EXPECTED == [4] or True",
    ),
    "makes a list something else": (
        "import gc\ndef f(x):\n    peer, = (o for o in gc.get_objects() if type(o).__name__ == 'ProgramPeer')\n"
        "    peer.send({'changed': [[0, {'dict': [['a', 4]]}]], 'value': 4})\n    return 4",
        "xs = [2]\nassert f(xs) == 4",
    ),
    "takes the number of a list of the test": (
        "import gc\ndef f(x):\n    peer, = (o for o in gc.get_objects() if type(o).__name__ == 'ProgramPeer')\n"
        "    peer.send({'value': {'shared': [0, {'list': [4]}]}})\n    return 4",
        "assert f(2) == [4]",
    ),
    "no longer holds what it was not given": (
        "import gc\ndef f(x):\n    peer, = (o for o in gc.get_objects() if type(o).__name__ == 'ProgramPeer')\n"
        "    peer.send({'dropped': [0, 7], 'value': 4})\n    return 4",
        "xs = [2]\nassert f(xs) == 4",
    ),
}
"""Programs that would pass a test of theirs by what they return, or read what it expects, if they could."""


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


def test_no_forged_result_scores() -> None:
    verifier = resolve("code")
    with nothing_left(), RewardPool(RewardConfig(sandbox="bubblewrap", timeout_s=30, processes=2)) as pool:
        rows = [Completion("p", f"```python\n{program}\n```", test) for program, test in FORGED.values()]
        outcomes = [future.result(600) for future in [pool.submit(row, verifier) for row in rows]]
    for name, one in zip(FORGED, outcomes, strict=True):
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
    (outcome,) = scores([program], tests)
    assert outcome.score == 1.0, outcome


def test_without_walls_programs_run_only_where_the_user_insists() -> None:
    insisting = {"sandbox": "process", "run_programs_without_walls": True}
    assert scores([HONEST], ASSERTS, **insisting)[0].score == 1.0
