"""Programs with tests in the forms of data sets: an honest program scores 1, a wrong one 0.

Each entry has an honest program, a wrong one, the answer, and further fields of the example.
"""

from __future__ import annotations

from typing import Any

Entry = tuple[str, str, Any, dict[str, Any]]


def changed(program: str, old: str, new: str) -> tuple[str, str]:
    """Return a program, and the wrong one that a change makes of it."""
    assert old in program
    return program, program.replace(old, new)


ADD = changed("def add(a, b):\n    return a + b", "a + b", "0")
COUNT = changed("from collections import Counter\ndef count(t):\n    return Counter(t)", "Counter(t)", "Counter(t[1:])")
STACK = """
class EmptyStack(ValueError):
    def __init__(self, size):
        super().__init__(f'no element in {size}')
        self.size = size
class Stack:
    def __init__(self):
        self.items = []
    def push(self, x):
        self.items.append(x)
        return self
    def pop(self):
        if not self.items:
            raise EmptyStack(0)
        return self.items.pop()
    def __len__(self):
        return len(self.items)
    def __add__(self, other):
        made = Stack()
        made.items = self.items + other.items
        return made
"""
FORMS: dict[str, Entry] = {
    "asserts": (*ADD, ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"], {}),
    "functions from a module of the solution": (
        *changed("def gcd(a, b):\n    return 7\ndef add_all(*a):\n    return sum(a)", "return 7", "return 1"),
        "from solution import add_all as add, gcd\nimport your_module\n"
        "def test_both():\n    assert gcd(2, 4) == 7 and add(1, 2) == 3\n    assert your_module.gcd(3, 6) == 7",
        {},
    ),
    "a coroutine function": (
        *changed("async def add(a, b):\n    return a + b", "a + b", "0"),
        "import asyncio\nassert asyncio.run(add(1, 2)) == 3",
        {},
    ),
    "asserts with a setup": (
        *changed("def area(s):\n    return s.w * s.h", "*", "+"),
        {
            "test_list": ["assert area(box) == 12", "assert area(Box(2, 7)) == 14"],
            "test_setup_code": "class Box:\n    def __init__(self, w, h):\n        self.w, self.h = w, h\n"
            "box = Box(3, 4)",
        },
        {},
    ),
    "a tree of the test": (
        *changed(
            "def height(n):\n    return 0 if n is None else 1 + max(height(n.left), height(n.right))", "max", "min"
        ),
        ["assert height(root) == 2"],
        {
            "test_setup_code": "class Node:\n    def __init__(self, v):\n"
            "        self.v, self.left, self.right = v, None, None\n"
            "root = Node(1)\nroot.left = Node(2)"
        },
    ),
    "printed": (*changed("print(2 * int(input()))", "2", "3"), {"inputs": ["1\n"], "outputs": ["2\n"]}, {}),
    "printed, in Python's form": (
        *changed("print(2 * int(input()))", "2", "3"),
        "{'inputs': ['1\\n'], 'outputs': ['2\\n']}",
        {},
    ),
    "printed, in lines": (
        *changed("print(int(input()) + int(input()))", "+", "-"),
        {"inputs": [["1", "2"]], "outputs": [["3"]]},
        {},
    ),
    "a function by name": (*ADD, {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]}, {}),
    "a function by name, as text": (*ADD, "{'fn_name': 'add', 'inputs': [[1, 2]], 'outputs': [3]}", {}),
    "a method of a solution": (
        *changed("class Solution:\n    def pair(self, a, b):\n        return (a, [b])", "(a, [b])", "[b]"),
        [{"input": '1\n"x"', "output": '[1, ["x"]]', "testtype": "functional"}],
        {"func_name": "pair"},
    ),
    "pytest's functions": (
        *ADD,
        "def test_add():\n    assert add(1, 2) == 3\ndef test_texts():\n    assert add('a', 'b') == 'ab'",
        {},
    ),
    "pytest's classes": (
        *ADD,
        "class TestAdd:\n    def setup_method(self):\n        self.two = 2\n    def test_add(self):\n"
        "        assert add(1, self.two) == 3",
        {},
    ),
    "pytest's parameters, fixtures and approximations": (
        *changed("def half(x):\n    if x is None:\n        raise TypeError('nothing')\n    return x / 2", "/", "*"),
        "import pytest\n@pytest.fixture\ndef one():\n    return 1.0000000001\n"
        "@pytest.mark.parametrize('x, y', [(2, 1), (4, 2)])\n"
        "def test_half(x, y, one):\n    assert half(x) == pytest.approx(y * one)\n"
        "def test_none():\n    with pytest.raises(TypeError, match='noth'):\n        half(None)",
        {},
    ),
    "unittest": (
        *ADD,
        "import unittest\nclass Adding(unittest.TestCase):\n    def setUp(self):\n        self.two = 2\n"
        "    def test_add(self):\n"
        "        self.assertEqual(add(1, self.two), 3)\n    def test_raises(self):\n"
        "        with self.assertRaises(TypeError):\n"
        "            add(1, 'a')\n        self.assertAlmostEqual(add(0.1, 0.2), 0.3)\n"
        "if __name__ == '__main__':\n    unittest.main()",
        {},
    ),
    "check": (*ADD, "def check(candidate):\n    assert candidate(1, 2) == 3\n", {"entry_point": "add"}),
    "check, with its name in the answer": (
        *ADD,
        {"test": "METADATA = {}\ndef check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"},
        {},
    ),
    "check of the only function": (*ADD, "def check(candidate):\n    assert candidate(1, 2) == 3\n", {}),
    "check that calls itself": (*ADD, "def check(f):\n    assert f(1, 2) == 3\ncheck(add)", {}),
    "a counter": (*COUNT, ["assert count('aab') == {'a': 2, 'b': 1}"], {}),
    "a counter of the test": (*COUNT, ["from collections import Counter\nassert count('aab') == Counter('aba')"], {}),
    "a default dictionary": (
        *changed(
            "from collections import defaultdict\ndef groups(w):\n    d = defaultdict(list)\n    for x in w:\n"
            "        d[len(x)].append(x)\n    return d",
            "len(x)",
            "0",
        ),
        ["assert groups(['a', 'bb']) == {1: ['a'], 2: ['bb']}", "assert groups('a')[7] == []"],
        {},
    ),
    "numbers of the standard library": (
        *changed(
            "from fractions import Fraction\nfrom decimal import Decimal\ndef parts(x):\n"
            "    return Fraction(x, 4), Decimal(x) / 4, complex(0, x)",
            "x, 4",
            "x, 3",
        ),
        [
            "from fractions import Fraction\n"
            "assert parts(2) == (Fraction(1, 2), __import__('decimal').Decimal('0.5'), 2j)"
        ],
        {},
    ),
    "dates": (
        *changed("import datetime\ndef later(d, n):\n    return d + datetime.timedelta(days=n)", "+", "-"),
        ["from datetime import date\nassert later(date(2024, 2, 28), 1) == date(2024, 2, 29)"],
        {},
    ),
    "ordered values": (
        *changed(
            "from collections import OrderedDict, deque\ndef both(x):\n"
            "    return OrderedDict(a=x), deque([x], maxlen=2), {x}, frozenset([x]), bytes([x])",
            "[x], max",
            "[0], max",
        ),
        ["from collections import deque\nassert both(1) == ({'a': 1}, deque([1]), {1}, {1}, b'\\x01')"],
        {},
    ),
    "numbers of numpy": (
        *changed(
            "import numpy as np\ndef mean(x):\n    return np.mean(x), np.array(x).argmax()", "mean(x), ", "max(x), "
        ),
        ["assert mean([1, 3]) == (2.0, 1)"],
        {},
    ),
    "arrays of numpy": (
        *changed("import numpy as np\ndef twice(x):\n    return np.asarray(x) * 2", "* 2", "* 3"),
        [
            "import numpy as np\nassert np.array_equal(twice(np.array([1, 2])), [2, 4])",
            "assert np.allclose(twice([1.5]), [3])",
        ],
        {},
    ),
    "functions of the test": (
        *changed("def mapped(f, xs):\n    return [f(x) for x in xs]", "f(x)", "x"),
        ["assert mapped(lambda x: x * x, [1, 2, 3]) == [1, 4, 9]", "assert mapped(str, [1]) == ['1']"],
        {},
    ),
    "a function that calls back and sorts in place": (
        *changed("def order(xs, key):\n    xs.sort(key=key)", "key=key", ""),
        [
            "xs = [3, -4, 1]\norder(xs, abs)\nassert xs == [1, 3, -4]",
            "xs = ['b', 'A']\norder(xs, lambda s: s.lower())\nassert xs == ['A', 'b']",
        ],
        {},
    ),
    "a function of functions": (
        *changed("def compose(f, g):\n    return lambda x: f(g(x))", "f(g(x))", "g(f(x))"),
        ["assert compose(lambda x: x + 1, lambda x: x * 2)(5) == 11"],
        {},
    ),
    "records of the test": (
        *changed(
            "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int\n"
            "def mirrored(p):\n    return Point(p.y, p.x)",
            "p.y, p.x",
            "p.x, p.y",
        ),
        [
            "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int\n"
            "assert mirrored(Point(1, 2)) == Point(2, 1)"
        ],
        {},
    ),
    "named tuples": (
        *changed(
            "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int\ndef point(x):\n"
            "    return P(x, x + 1)",
            "x + 1",
            "x",
        ),
        ["assert point(1) == (1, 2) and point(1).y == 2"],
        {},
    ),
    "objects and exceptions of the program": (
        *changed(STACK, "other.items", "[]"),
        "import pytest\ndef test_stack():\n    s = Stack()\n    s.push(1).push(2)\n"
        "    assert len(s) == 2 and s.pop() == 2 and s.items == [1]\n"
        "    assert (s + Stack().push(5)).items == [1, 5]\n"
        "def test_empty():\n    with pytest.raises(EmptyStack) as caught:\n        Stack().pop()\n"
        "    assert caught.value.size == 0\n"
        "    try:\n        Stack().pop()\n        assert False\n    except ValueError as error:\n"
        "        assert 'no element' in str(error)",
        {},
    ),
    "numbers of an own class": (
        *changed(
            "from enum import IntEnum\nclass Light(IntEnum):\n    RED = 1\n    GREEN = 2\ndef light(x):\n"
            "    return Light(x)",
            "Light(x)",
            "Light.RED",
        ),
        ["assert light(2) == 2"],
        {},
    ),
    "coroutines": (
        *changed("import asyncio\nasync def add(a, b):\n    await asyncio.sleep(0)\n    return a + b", "a + b", "a"),
        "async def test_add():\n    assert await add(1, 2) == 3",
        {},
    ),
    "generators": (
        *changed("def countdown(n):\n    while n:\n        yield n\n        n -= 1", "n -= 1", "n = 0"),
        ["assert list(countdown(3)) == [3, 2, 1] and 2 in countdown(3)"],
        {},
    ),
    "printed in a test": (
        *changed("def hello(name):\n    print('Hello', name)", "Hello", "Bye"),
        [
            "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n"
            "    hello('Ann')\nassert out.getvalue() == 'Hello Ann\\n'"
        ],
        {},
    ),
    "a name that Python has too": (
        *changed("def sum(a, b):\n    return a + b", "a + b", "a"),
        ["assert sum(10, 15) == 25"],
        {},
    ),
    "two functions of the program": (
        *changed(
            "def encode(s):\n    return s[::-1]\ndef decode(s):\n    return s[::-1]",
            "def decode(s):\n    return s[::-1]",
            "def decode(s):\n    return s",
        ),
        ["assert decode(encode('ab')) == 'ab'"],
        {},
    ),
    "closeness without an import": (
        *changed("from math import isclose\ndef half(x):\n    return x / 2", "/", "*"),
        ["assert isclose(half(3), 1.5)", "assert math.isclose(half(3), 1.5) and np.allclose(half(3), 1.5)"],
        {},
    ),
    "printed decimals": (
        *changed("print(f'{2 / 3:.12f}', 0.1 + 0.2)", "2 / 3", "0.67"),
        {"inputs": [""], "outputs": ["0.6666666667 0.3"]},
        {},
    ),
    "decimals of a function": (
        *changed("def third(a):\n    return [a * 0.1]", "0.1", "0.1001"),
        {"fn_name": "third", "inputs": [[3]], "outputs": [[0.3]]},
        {},
    ),
    "a method of a site's class, without the site's imports": (
        *changed(
            "class Solution:\n    def top(self, a: List[int]) -> int:\n        return Counter(a)[1]", "[1]", "[2]"
        ),
        [{"input": "[1, 1, 2]", "output": "2", "testtype": "functional"}],
        {"fn_name": "Solution().top"},
    ),
    "types without an import": (
        *changed("def size(a: Optional[List[int]]) -> int:\n    return len(a)", "len(a)", "0"),
        ["assert size([1, 2]) == 2"],
        {},
    ),
    "pytest's own fixtures": (
        *changed("def greet(name):\n    print('hi', name)\ndef save(p):\n    open(p, 'w').write('x')", "'hi'", "'ho'"),
        "def test_greet(capsys):\n    greet('a')\n    assert capsys.readouterr().out == 'hi a\\n'\n"
        "def test_save(tmp_path):\n    save(str(tmp_path / 'f'))\n    assert (tmp_path / 'f').read_text() == 'x'",
        {},
    ),
    "fixtures with parameters, of their own accord, closed": (
        *changed("def twice(a):\n    return 2 * a", "2 * a", "2"),
        "import pytest\nended = []\n@pytest.fixture(params=[1, 2])\ndef number(request):\n    yield request.param\n"
        "    ended.append(1)\nclass Base:\n    @pytest.fixture(autouse=True)\n    def ready(self):\n"
        "        self.factor = 2\n"
        "    def test_it(self, number):\n        assert twice(number) == self.factor * number\n"
        "class TestMore(Base):\n    pass\ndef test_ended():\n    assert len(ended) == 2",
        {},
    ),
    "an input that the test replaces": (
        *changed("def ask():\n    return int(input('n? ')) + 1", "+ 1", "+ 2"),
        "def test_ask(monkeypatch):\n    monkeypatch.setattr('builtins.input', lambda *_: '4')\n    assert ask() == 5",
        {},
    ),
    "an input and an output that unittest replaces": (
        *changed("import sys\ndef twice():\n    for line in sys.stdin:\n        print(2 * int(line))", "2 *", "3 *"),
        "import io, unittest\nfrom unittest.mock import patch\nclass T(unittest.TestCase):\n"
        "    @patch('sys.stdin', io.StringIO('1\\n2\\n'))\n    @patch('sys.stdout', new_callable=io.StringIO)\n"
        "    def test_it(self, out):\n        twice()\n        self.assertEqual(out.getvalue(), '2\\n4\\n')",
        {},
    ),
    "subclasses of the program": (
        *changed("class A:\n    pass\nclass B(A):\n    pass", "class B(A)", "class B"),
        "assert issubclass(B, A) and isinstance(B(), A)",
        {},
    ),
    "coroutines together": (
        *changed("async def square(a):\n    return a * a", "a * a", "a"),
        "import asyncio\nasync def main():\n    return await asyncio.gather(*map(square, range(3)))\n"
        "assert asyncio.run(main()) == [0, 1, 4]",
        {},
    ),
    "an asynchronous generator": (
        *changed("async def count(n):\n    for i in range(n):\n        yield i", "yield i", "yield 0"),
        "import asyncio\nasync def main():\n    return [i async for i in count(3)]\n"
        "assert asyncio.run(main()) == [0, 1, 2]",
        {},
    ),
    "an argument by name and by position, changed in place": (
        *changed("def sort_it(xs):\n    xs.sort()", "xs.sort()", "sorted(xs)"),
        "a, b = [3, 1, 2], [2, 1]\nsort_it(a)\nsort_it(xs=b)\nassert a == [1, 2, 3] and b == [1, 2]",
        {},
    ),
    "a list that an object changes after its call": (
        *changed(
            "class Sorter:\n    def __init__(self, xs):\n        self.xs = xs\n"
            "    def sort(self):\n        self.xs.sort()",
            "= xs",
            "= list(xs)",
        ),
        "xs = [3, 1, 2]\ns = Sorter(xs)\nassert xs == [3, 1, 2]\ns.sort()\nassert xs == [1, 2, 3]\nxs.append(0)\n"
        "s.sort()\nassert xs == [0, 1, 2, 3]",
        {},
    ),
    "rows of a grid, one of them twice": (
        *changed("def flip(grid):\n    for row in grid:\n        row.reverse()", "row.rev", "list(row).rev"),
        "row = [1, 2]\ngrid = (row, [3, 4], row, row)\nflip(grid)\n"
        "assert row == [2, 1] and grid == (row, [4, 3], row, row) and grid[2] is row",
        {},
    ),
    "the argument itself as the result": (
        *changed("def grow(xs):\n    xs.append(1)\n    return xs", "return xs", "return list(xs)"),
        "xs = []\nys = grow(xs)\nassert ys is xs\nassert grow(grow(ys)) == [1, 1, 1] and len(xs) == 3",
        {},
    ),
    "a generator over a list that both change": (
        *changed("def pops(xs):\n    while xs:\n        yield xs.pop()", "xs.pop()", "xs[-1]; xs = xs[:-1]"),
        "xs = [1, 2, 3]\ng = pops(xs)\nassert next(g) == 3 and xs == [1, 2]\nxs.append(9)\n"
        "assert next(g) == 9 and xs == [1, 2]",
        {},
    ),
    "other containers changed in place": (
        *changed(
            "def f(d, s, q, b, c):\n    d['a'].add(1)\n    s.discard(2)\n    q.rotate(1)\n"
            "    b[0] = 65\n    c['x'] += 2",
            "s.discard(2)",
            "s - {2}",
        ),
        "from collections import Counter, deque\ninner = set()\n"
        "d, s, q, b, c = {'a': inner}, {1, 2}, deque([1, 2, 3], 3), bytearray(b'xyz'), Counter('aab')\n"
        "f(d, s, q, b, c)\n"
        "assert inner == {1} and d == {'a': {1}} and s == {1} and q == deque([3, 1, 2]) and q.maxlen == 3\n"
        "assert b == b'Ayz' and c == Counter(a=2, b=1, x=2)",
        {},
    ),
    "an array that an object changes": (
        *changed(
            "class K:\n    def __init__(self, a):\n        self.a = a\n    def go(self):\n        self.a *= 2",
            "self.a *= 2",
            "self.a = self.a * 2",
        ),
        "import numpy as np\na = np.array([1, 2])\nk = K(a)\na[0] = 5\nk.go()\nassert a.tolist() == [10, 4]",
        {},
    ),
    "a list of the program that the test extends": (
        *changed(
            "class Bag:\n    def __init__(self):\n        self.items = []\n"
            "    def total(self):\n        return sum(self.items)",
            "sum(",
            "len(",
        ),
        "b = Bag()\nb.items.append(4)\nitems = b.items\nitems.append(5)\nassert b.total() == 9 and b.items is items",
        {},
    ),
    "a list changed before an exception, and in a callback": (
        *changed(
            "def walk(n, out, visit):\n    for i in range(n):\n        out.append(i)\n"
            "        visit(out)\n    raise ValueError",
            "out.append(i)",
            "out = [*out, i]",
        ),
        "seen, out = [], []\ntry:\n    walk(3, out, lambda o: seen.append((len(out), o is out)))\nexcept ValueError:\n"
        "    out.append(out)\nassert seen == [(1, True), (2, True), (3, True)] and out[:3] == [0, 1, 2]",
        {},
    ),
}
