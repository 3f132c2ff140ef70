"""The conversation between the process of a test and that of a program: calls in both directions, values by value.

test ──{"ask": [verb, on, name, arguments]}──▶ program        a line of JSON each
     ◀──────{"value": ...} or {"error": ...}──                in between, each side may send requests to the other

A value of Python's, the standard library's or numpy's types crosses as plain data and is rebuilt by the receiver. A
mutable one is then shared: as long as both ends hold it, each message first brings the changes that its sender made.
Any other value is not sent: the other side gets a `Foreign` proxy, which forwards operations. The program's process
executes only this file, so it imports only light modules.
"""

import json
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

DEPTH = 40
"""Levels of nesting that cross by value."""
PLAIN_INT = 1 << 53
"""Integers below are JSON's; Python reads no longer ones than 4,300 digits from it."""
ATTRIBUTES = ("__name__", "__qualname__", "__doc__")
"""The only attributes with underscores at both ends that are asked for: others would change how the test computes."""
PLAIN_MUTABLE: dict[str, Callable[[], Any]] = {"list": list, "dict": dict, "set": set, "bytearray": bytearray}
"""Mutable types of Python, which may contain themselves."""
MUTABLE = (
    *PLAIN_MUTABLE,
    *(f"collections.{name}" for name in ("deque", "Counter", "OrderedDict", "defaultdict")),
    "array.array",
    "numpy.ndarray",
)
COMPARED = 4096
"""Elements of the longest shared value that is compared at every message; a longer one only at calls that have it."""

Payload = Any
VALUES: dict[str, tuple[Callable[[Any], Payload], Callable[[Any, Payload], Any]]] = {
    "int": (hex, lambda kind, text: kind(text, 16)),
    "bytes": (bytes.hex, lambda kind, text: kind.fromhex(text)),
    "bytearray": (bytearray.hex, lambda kind, text: kind.fromhex(text)),
    "complex": (lambda value: [value.real, value.imag], lambda kind, parts: kind(*parts)),
    "list": (list, lambda kind, parts: parts),
    "tuple": (list, lambda kind, parts: kind(parts)),
    "set": (list, lambda kind, parts: kind(parts)),
    "frozenset": (list, lambda kind, parts: kind(parts)),
    "dict": (lambda value: [list(pair) for pair in value.items()], lambda kind, pairs: kind(pairs)),
    "dict_keys": (list, lambda kind, parts: dict.fromkeys(parts).keys()),
    "range": (lambda value: [value.start, value.stop, value.step], lambda kind, parts: kind(*parts)),
    "slice": (lambda value: [value.start, value.stop, value.step], lambda kind, parts: kind(*parts)),
    "collections.Counter": (lambda value: [list(pair) for pair in value.items()], lambda kind, p: kind(dict(p))),
    "collections.OrderedDict": (lambda value: [list(pair) for pair in value.items()], lambda kind, p: kind(p)),
    "collections.defaultdict": (
        lambda value: [value.default_factory, [list(pair) for pair in value.items()]],
        lambda kind, parts: kind(parts[0] if isinstance(parts[0], type) else None, parts[1]),
    ),
    "collections.deque": (lambda value: [list(value), value.maxlen], lambda kind, parts: kind(*parts)),
    "decimal.Decimal": (str, lambda kind, text: kind(text)),
    "fractions.Fraction": (lambda value: [value.numerator, value.denominator], lambda kind, parts: kind(*parts)),
    "datetime.date": (lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "datetime.datetime": (lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "datetime.time": (lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "datetime.timedelta": (lambda v: [v.days, v.seconds, v.microseconds], lambda kind, parts: kind(*parts)),
    "datetime.timezone": (lambda value: value.utcoffset(None), lambda kind, offset: kind(offset)),
    "array.array": (lambda value: [value.typecode, list(value)], lambda kind, parts: kind(*parts)),
    "uuid.UUID": (lambda value: value.hex, lambda kind, text: kind(text)),
    "pathlib.PosixPath": (str, lambda kind, text: kind(text)),
    "pathlib.PurePosixPath": (str, lambda kind, text: kind(text)),
    "types.SimpleNamespace": (lambda value: dict(vars(value)), lambda kind, names: kind(**names)),
}
"""By a type's name, how its value is written, and how it is read again."""


def numpy_written(value: Any) -> Payload:
    """Return a numpy array or scalar as its dtype, shape and bytes; an array of objects as their list."""
    if value.dtype.kind == "O":
        return ["O", list(value.shape), value.ravel().tolist()]
    if value.dtype.kind not in "biufcSUmM":
        raise TypeError(f"numpy's {value.dtype} does not cross between processes")
    return [value.dtype.str, list(value.shape) if type(value).__name__ == "ndarray" else None, value.tobytes().hex()]


def numpy_read(parts: Payload) -> Any:
    import numpy

    dtype, shape, content = parts
    if dtype == "O":
        array = numpy.empty(len(content), dtype=object)
        array[:] = content
        return array.reshape(shape)
    if numpy.dtype(dtype).kind not in "biufcSUmM":
        raise ValueError(f"numpy's {dtype} does not cross between processes")
    array = numpy.frombuffer(bytes.fromhex(content), dtype=dtype).copy()
    return array[0] if shape is None else array.reshape(shape)


class Shared:
    """The mutable values that both ends hold, by number, with the contents that both know."""

    def __init__(self, first: int) -> None:
        """Number the values that this end sends `first`, `first + 2`, ...; the other end has the numbers between."""
        self.next, self.values, self.numbers = first, dict[int, Any](), dict[int, int]()
        self.known = dict[int, Any]()

    def add(self, value: Any, number: int | None = None) -> int:
        """Share a value, under the number that the other end gave it if it sent it."""
        if number is None:
            number, self.next = self.next, self.next + 2
        elif number in self.values or number % 2 == self.next % 2:
            raise ValueError(f"{number} is another value's number")
        self.values[number], self.numbers[id(value)] = value, number
        self.note(number)
        return number

    def note(self, number: int) -> None:
        """Remember the contents of a value as known to both ends."""
        self.known[number] = contents(self.values[number])

    def drop(self, number: int) -> None:
        """Share a value no longer: one end does not hold it any more."""
        del self.numbers[id(self.values.pop(number))], self.known[number]

    def unused(self) -> list[int]:
        """Return the numbers of values that nothing else in this process holds."""
        # Two references are the table's and the argument's.
        return [number for number in self.values if sys.getrefcount(self.values[number]) <= 2]

    def changed(self, arguments: Iterable[Any]) -> list[int]:
        """Return the numbers of values with other contents than the other end knows."""
        given = {id(argument) for argument in arguments}
        return [
            number
            for number, known in self.known.items()
            if (len(known) <= COMPARED or id(self.values[number]) in given)
            and not same_contents(contents(self.values[number]), known)
        ]


def contents(value: Any) -> Any:
    """Return a mutable value's elements, or its bytes."""
    if hasattr(value, "tobytes"):
        return bytes(value.tobytes()) if getattr(value, "dtype", "") != "object" else tuple(value.ravel())
    if isinstance(value, bytearray):
        return bytes(value)
    return tuple(part for pair in value.items() for part in pair) if isinstance(value, dict) else tuple(value)


def same_contents(one: Any, other: Any) -> bool:
    """Return whether bytes are equal, or all elements the same objects: an element's own comparison does not count."""
    if isinstance(one, bytes):
        return bool(one == other)
    return len(one) == len(other) and all(map(operator.is_, one, other))


class Peer:
    """One end of a conversation: it sends requests to the other end, and answers its requests."""

    foreign: type["Foreign"]
    """What stands here for a value of the other end."""
    awaitable: type["Foreign"]
    """What stands here for a coroutine of the other end."""

    def __init__(self, requests: Any, answers: Any, first: int) -> None:
        """Write to the file `requests`, and read from the file `answers`; `first` numbers the values that it shares."""
        self.requests, self.answers, self.kept_values = requests, answers, list[Any]()
        self.shared = Shared(first)
        self.numbers, self.errors = dict[int, int](), dict[int, type[BaseException]]()

    def ask(self, verb: str, on: Any = None, name: str = "", *arguments: Any, **named: Any) -> Any:
        """Send a request to the other process, serve its requests meanwhile; return its answer, or raise."""
        changes = self.changes((*arguments, *named.values()))
        sent = [self.encoded(value) for value in arguments]
        by_name = {key: self.encoded(value) for key, value in named.items()}
        self.send({**changes, "ask": [verb, self.encoded(on), name, sent, by_name]})
        while "ask" in (answer := self.heard()):
            self.send(self.answer(answer["ask"]))
        if "error" in answer:
            raise self.raised(answer)
        return self.decoded(answer.get("value"))

    def changes(self, arguments: Iterable[Any] = ()) -> dict[str, Any]:
        """Return the part of a message that brings the other end's copies of shared values up to date.

        It is made before the rest of the message is encoded, and read first: the rest may name what it brings.
        """
        changed = list[Any]()
        for number in self.shared.changed(arguments):
            value = self.shared.values[number]
            changed.append([number, self.by_value(value, name_of(type(value)), 0)])
            self.shared.note(number)
        dropped = self.shared.unused()
        for number in dropped:
            self.shared.drop(number)
        return {"changed": changed, "dropped": dropped}

    def heard(self) -> dict[str, Any]:
        """Receive a message, and adopt the changes of shared values that it brings."""
        message = self.receive()
        for number, sent in message.get("changed") or ():
            replace(self.shared.values[number], self.decoded(sent))
            self.shared.note(number)
        for number in message.get("dropped") or ():
            self.shared.drop(number)
        return message

    def answer(self, request: Any) -> dict[str, Any]:
        """Execute a request of the other end; return the value, or the exception."""
        try:
            verb, on, name, sent, named = request
            arguments = [self.decoded(argument) for argument in sent]
            by_name = {key: self.decoded(argument) for key, argument in named.items()}
            value = self.do(verb, self.decoded(on), name, arguments, by_name)
            return {**self.changes((*arguments, *by_name.values())), "value": self.encoded(value)}
        except self.caught as error:
            return {**self.changes(), **self.described_error(error)}

    caught: tuple[type[BaseException], ...] = (Exception,)

    def do(self, verb: str, on: Any, name: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Execute one operation that the other end requests."""
        if verb == "call":
            return on(*arguments, **named)
        if verb == "attribute":
            return getattr(on, name)
        if verb == "set":
            return setattr(on, name, *arguments)
        if verb == "method":
            return getattr(on, name)(*arguments)
        if verb == "operator":
            return getattr(operator, name)(*arguments)
        if verb == "next":
            return next(on)
        if verb == "truth":
            return bool(on)
        if verb == "instance":
            return isinstance(arguments[0], on)
        raise ValueError(verb)

    def send(self, message: dict[str, Any]) -> None:
        self.requests.write(json.dumps(message) + "\n")
        self.requests.flush()

    def receive(self) -> dict[str, Any]:
        line = self.answers.readline()
        if not line:
            os._exit(0)
        message: dict[str, Any] = json.loads(line)
        return message

    def keep(self, value: Any) -> int:
        """Return a permanent number for one of this end's values."""
        number = self.numbers.setdefault(id(value), len(self.kept_values))
        if number == len(self.kept_values):
            self.kept_values.append(value)  # keeps the value alive as long as its number
        return number

    def encoded(self, value: Any, depth: int = 0) -> Payload:
        """Return a value as plain data for the other end."""
        kind = type(value)
        if value is None or kind in (bool, float, str) or (kind is int and abs(value) < PLAIN_INT):
            return value
        if isinstance(value, Foreign):
            return {"yours": object.__getattribute__(value, "_number")}
        name = name_of(kind)
        try:
            if depth < DEPTH and name in MUTABLE:
                return self.shared_once(value, name, depth)
            if depth < DEPTH and (name in VALUES or (kind.__module__ == "numpy" and hasattr(value, "dtype"))):
                return self.by_value(value, name, depth)
            if depth < DEPTH and isinstance(value, tuple) and is_named(kind):
                parts = [self.encoded(part, depth + 1) for part in value]
                return {"namedtuple": [kind.__name__, list(kind._fields), parts]}
            if depth < DEPTH and "dataclasses" in sys.modules and hasattr(kind, "__dataclass_fields__"):
                fields = {key: self.encoded(getattr(value, key), depth + 1) for key in kind.__dataclass_fields__}
                return {"record": [kind.__name__, fields, self.keep(value)]}
        except (AttributeError, TypeError, ValueError):
            pass
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": self.described(value)}
        return self.reference(value)

    def by_value(self, value: Any, name: str, depth: int) -> Payload:
        """Return a value of a known type as its name and contents."""
        if name not in VALUES:
            return {"numpy": [self.encoded(part, depth + 1) for part in numpy_written(value)]}
        payload = VALUES[name][0](value)
        parts = [self.encoded(part, depth + 1) for part in payload] if type(payload) is list else None
        return {name: self.encoded(payload, depth + 1) if parts is None else parts}

    def shared_once(self, value: Any, name: str, depth: int) -> Payload:
        """Return the number of a mutable value, with its contents where the other end does not have it yet."""
        number = self.shared.numbers.get(id(value))
        if number is not None:
            return {"shared": [number]}
        number = self.shared.add(value)
        try:
            return {"shared": [number, self.by_value(value, name, depth)]}
        except (AttributeError, TypeError, ValueError):
            self.shared.drop(number)
            raise

    def reference(self, value: Any) -> Payload:
        """Return the reference for a value that is not sent."""
        if isinstance(value, type) and value.__module__ == "builtins":
            return {"standard": f"builtins.{value.__qualname__}"}
        return {"coroutine" if type(value).__name__ == "coroutine" else "mine": self.keep(value)}

    def decoded(self, sent: Payload) -> Any:
        """Rebuild a value. Raises ValueError, TypeError, KeyError or IndexError for invalid data."""
        if sent is None or isinstance(sent, bool | float | str | int):
            return sent
        if isinstance(sent, list):
            return [self.decoded(part) for part in sent]
        ((name, payload),) = sent.items()
        if name in ("mine", "coroutine"):
            return (self.foreign if name == "mine" else self.awaitable)(self, int(payload))
        if name == "yours":
            return self.kept_values[int(payload)]
        if name == "shared":
            return self.shared_value(*payload)
        if name == "exception":
            return self.exception(payload)
        if name == "standard":
            return self.standard(str(payload))
        if name == "record":
            return self.record(
                str(payload[0]), {str(key): self.decoded(p) for key, p in payload[1].items()}, payload[2]
            )
        if name == "namedtuple":
            from collections import namedtuple

            parts = [self.decoded(part) for part in payload[2]]
            return namedtuple(payload[0], payload[1], rename=True)(*parts)
        payload = self.decoded(payload)
        if name == "numpy":
            return numpy_read(payload)
        module, _, kind = name.rpartition(".")
        return VALUES[name][1](getattr(__import__(module or "builtins"), kind, None), payload)

    def shared_value(self, number: int, sent: Payload = None) -> Any:
        """Return the value of a number, which is made from `sent` if this end does not have it yet."""
        if sent is None:
            return self.shared.values[number]
        ((name, _),) = sent.items()
        if name not in (*MUTABLE, "numpy"):
            raise ValueError(f"{name} is no mutable type")
        # A value of Python's types has its number before its contents, which may contain it.
        value = PLAIN_MUTABLE[name]() if name in PLAIN_MUTABLE else self.decoded(sent)
        self.shared.add(value, number)
        if name in PLAIN_MUTABLE:
            replace(value, self.decoded(sent))
            self.shared.note(number)
        return value

    def standard(self, name: str) -> Any:
        """Return a built-in type by name."""
        import builtins

        kind = getattr(builtins, name.removeprefix("builtins."), None)
        if not isinstance(kind, type):
            raise ValueError(f"{name} is no type of Python's")
        return kind

    def record(self, name: str, fields: dict[str, Any], number: int) -> Any:
        """Return a dataclass's value as an instance of this process's class of that name and fields, if any."""
        kind = self.dataclass(name)
        if kind is None or list(getattr(kind, "__dataclass_fields__", ())) != list(fields):
            return self.foreign(self, int(number))
        instance = object.__new__(kind)
        for key, value in fields.items():
            object.__setattr__(instance, key, value)
        return instance

    def dataclass(self, name: str) -> Any:
        """Return this process's dataclass of that name, if there is one."""
        raise NotImplementedError

    def described(self, kind: type[BaseException]) -> Payload:
        """Describe an exception's class by its bases: Python's by name."""
        if kind.__module__ == "builtins":
            return kind.__name__
        number = getattr(kind, "_number", None)
        if number is not None:
            return {"yours": number}
        bases = [self.described(base) for base in kind.__bases__ if issubclass(base, BaseException)]
        return [self.keep(kind), kind.__name__, bases, kind.__module__]

    def exception(self, described: Payload) -> type[BaseException]:
        """Return the class of an exception, or a substitute for a class of the other process."""
        import builtins

        if isinstance(described, str):
            kind = getattr(builtins, described)
            if not issubclass(kind, BaseException):
                raise TypeError(f"{described} is no exception")
            return kind
        if isinstance(described, dict):
            return self.kept_values[int(described["yours"])]
        number, name, bases, module = described
        standard = getattr(sys.modules.get(module), name, None) if module in sys.stdlib_module_names else None
        if isinstance(standard, type) and issubclass(standard, BaseException):
            return standard
        if number not in self.errors:
            parents = tuple(map(self.exception, bases))
            self.errors[number] = type(str(name), parents, {"_number": int(number), "__getattr__": of_foreign_error})
        return self.errors[number]

    def described_error(self, error: BaseException) -> dict[str, Any]:
        try:
            return {
                "error": self.described(type(error)),
                "arguments": [self.encoded(argument) for argument in error.args],
                "text": str(error)[:200],
                "instance": self.keep(error),
            }
        except Exception:
            return {"error": "Exception", "arguments": [], "text": "", "instance": self.keep(error)}

    def raised(self, answer: dict[str, Any]) -> BaseException:
        """Return the exception that the other end raised."""
        kind = self.exception(answer["error"])
        try:
            error = kind(*(self.decoded(argument) for argument in answer["arguments"]))
        except (TypeError, ValueError):
            error = kind(str(answer.get("text")))
        error._foreign = self.foreign(self, int(answer["instance"]))  # type: ignore[attr-defined]
        return error


def of_foreign_error(error: Any, name: str) -> Any:
    """Return an attribute of an exception whose class belongs to the other end."""
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(error._foreign, name)


def is_named(kind: Any) -> bool:
    """Return True if a class is a named tuple that compares as tuples do."""
    return hasattr(kind, "_fields") and kind.__eq__ is tuple.__eq__ and kind.__new__ is not tuple.__new__


def replace(mine: Any, changed: Any) -> None:
    """Copy into a mutable value of this end the contents that the other end gave to its copy."""
    kind = name_of(type(mine))
    if kind != name_of(type(changed)):
        raise TypeError(f"a {kind} cannot become a {name_of(type(changed))}")
    if kind == "numpy.ndarray":
        if mine.shape == changed.shape:
            mine[...] = changed
    elif kind in ("list", "bytearray", "array.array"):
        mine[:] = changed
    else:
        mine.clear()
        (mine.extend if kind == "collections.deque" else mine.update)(changed)


def name_of(kind: Any) -> str:
    """Return the name by which a type crosses."""
    return str(kind.__qualname__) if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class Foreign:
    """A proxy of a value of the other end, where all operations are executed."""

    def __init__(self, peer: Peer, number: int) -> None:
        """Store the value's `number` at the other end."""
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._peer.ask("call", self, "", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ATTRIBUTES:
            raise AttributeError(name)
        return self._peer.ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self, name, value)

    def __bool__(self) -> bool:
        return self._peer.ask("truth", self) is True

    def __instancecheck__(self, value: Any) -> bool:
        return self._peer.ask("instance", self, "", value) is True

    def __iter__(self) -> Iterator[Any]:
        steps = special("__iter__")(self)
        while True:
            try:
                value = self._peer.ask("next", steps)
            except StopIteration:
                return
            yield value

    def __next__(self) -> Any:
        return self._peer.ask("next", self)

    def __await__(self) -> Iterator[Any]:
        yield from ()
        return self._peer.ask("await", self)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return self._peer.ask("method", self, "__exit__", kind, None, None)

    def __hash__(self) -> int:
        return int(special("__hash__")(self))


def special(name: str) -> Callable[..., Any]:
    def called(self: Any, *arguments: Any) -> Any:
        try:
            return self._peer.ask("method", self, name, *arguments)
        except AttributeError as error:  # Python raises TypeError for missing special methods
            raise TypeError(str(error)) from None

    return called


def operating(name: str, reflected: bool = False) -> Callable[..., Any]:
    def called(self: Any, other: Any) -> Any:
        return self._peer.ask("operator", None, name, *((other, self) if reflected else (self, other)))

    return called


ASKED = "len str repr getitem setitem delitem contains reversed int float index abs neg pos invert round enter format"
OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
COMPARISONS = "eq ne lt le gt ge"
DOCUMENTED = property(lambda value: value._peer.ask("attribute", value, "__doc__"))
"""What a value's own documentation is; a class would answer with its own."""
setattr(Foreign, "__doc__", DOCUMENTED)  # noqa: B010 (types know it as a text)
for _name in ASKED.split():
    setattr(Foreign, f"__{_name}__", special(f"__{_name}__"))
for _name in OPERATORS.split():
    _bare = _name + "_" if _name in ("and", "or") else _name
    setattr(Foreign, f"__{_name}__", operating(_bare))
    setattr(Foreign, f"__r{_name}__", operating(_bare, reflected=True))
    setattr(Foreign, f"__i{_name}__", operating("i" + _name))
for _name in COMPARISONS.split():
    setattr(Foreign, f"__{_name}__", operating(_name))


class ProgramPeer(Peer):
    """The program's end: it executes the program, then calls its functions and reads its values on request."""

    foreign = awaitable = Foreign
    caught = (BaseException,)

    def serve(self, names: dict[str, Any]) -> None:
        """Answer requests until the test's process closes the connection."""
        import builtins

        self.names, sys.stdin = names, AskedInput(self)
        builtins.input = sys.stdin.line
        while True:
            answer = self.answer(self.heard()["ask"])
            sys.stdout.flush()
            self.send(answer)

    def do(self, verb: str, on: Any, name: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        if verb == "name":
            return self.names[name]
        if verb == "functions":
            functions = ((key, value) for key, value in self.names.items() if type(value).__name__ == "function")
            return [key for key, value in functions if value.__module__ == "program"]
        if verb == "await":
            import asyncio

            async def awaited() -> Any:
                return await on

            return asyncio.run(awaited())
        if verb == "base":
            return base_of(on)
        if verb == "subclass":
            return issubclass(*arguments)
        return super().do(verb, on, name, arguments, named)

    def standard(self, name: str) -> Any:
        """Return a type or function of a standard module, named by a test."""
        import importlib

        module, _, path = name.partition(".")
        loaded = importlib.import_module(module)
        for part in path.split("."):
            loaded = getattr(loaded, part)
        return loaded

    def dataclass(self, name: str) -> Any:
        return self.names.get(name)


class AskedInput:
    """The input of a program while its test runs: what the test has put in place of `input` or `sys.stdin`."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def line(self, prompt: Any = "", /) -> str:
        """Do what `input` does."""
        if prompt != "":
            print(prompt, end="", flush=True)
        line: str = self.peer.ask("input", None, "", None)
        if not line:
            raise EOFError("EOF when reading a line")
        return line.removesuffix("\n")

    def readline(self) -> str:
        try:
            line: str = self.peer.ask("input", None, "", None)
        except EOFError:
            line = ""
        return line

    def read(self, size: int = -1) -> str:
        try:
            text: str = self.peer.ask("input", None, "", size)
        except EOFError:
            text = ""
        return text

    def readlines(self) -> list[str]:
        return list(self)

    def __iter__(self) -> Iterator[str]:
        return iter(self.readline, "")

    @property
    def buffer(self) -> Any:
        """The rest of the input as bytes."""
        import io

        return io.BytesIO(self.read().encode())

    def isatty(self) -> bool:
        return False


def base_of(value: Any) -> Any:
    """Return the plain value of an instance of a subclass that compares as its base does; otherwise raise TypeError."""
    bases: tuple[Any, ...] = (int, float, str, bytes, list, tuple, dict, set, frozenset)
    for base in bases:
        if isinstance(value, base) and type(value).__eq__ is base.__eq__:
            return base(value)
    raise TypeError(f"{type(value).__name__} has no plain value")


def main(requests: int, answers: int) -> None:
    """Execute the imports and the program in the first line of `requests`, and serve the test."""
    from types import ModuleType

    peer = ProgramPeer(os.fdopen(answers, "w"), os.fdopen(requests, "r"), 1)
    module = sys.modules["program"] = ModuleType("program")
    prelude, program = json.loads(peer.answers.readline())
    if prelude:
        exec(prelude, vars(module))
    exec(compile(program, "program.py", "exec"), vars(module))
    peer.serve(vars(module))
