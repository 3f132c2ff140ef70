"""The leader of an engine's processes, which each hold a slice of the model: all execute the same commands in the same order.

run ──▶ leader ──add, abort, clear ... step──▶ follower, follower, ...        within a step they run collectives in each layer

Drawing is deterministic, so that all processes draw the same tokens, and the leader's results are everybody's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from braidrl.rollout.embedded.engine import EmbeddedEngine
from braidrl.rollout.engine import EngineError, WeightSource
from braidrl.rollout.requests import Response, Uid
from braidrl.rollout.row import Row
from braidrl.rollout.weights.shared_file import WeightFile
from braidrl.rollout.wire import plain_request, request_of

Command = list[Any]
"""A method's name and plain arguments."""


class Followers(Protocol):
    """The other processes of an engine, as their leader sees them."""

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands without waiting until they are done."""

    def wait(self) -> None:
        """Wait until all have acknowledged. Raises RuntimeError for a follower that failed."""

    def describe_end(self, error: Exception) -> str:
        """Say which followers ended, and how; where none did, what the leader saw."""


class LeadingEngine(EmbeddedEngine):
    """Used like an engine that has the full model. After a failure of any process every call raises `EngineError`."""

    def __init__(self, followers: Followers, **settings: Any) -> None:
        """Make the engine with `settings` of `EmbeddedEngine`."""
        super().__init__(**settings)
        self._followers = followers
        self._pending: list[Command] = []
        self._failure: EngineError | None = None

    def await_followers(self) -> None:
        """Wait until all have loaded their slices. Raises EngineError for one that did not."""
        with self._in_lockstep():
            self._followers.wait()

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        """Raise ValueError also for a source that is no file: every process reads its own part."""
        if not isinstance(source, WeightFile):
            raise ValueError("an engine of several processes takes weights from a file that all of them can read")
        given = self._weights.checked(source)
        with self._in_lockstep():
            self._command("publish", version, str(source.path))
            self._weights.take(given)
            self._changed(version)
            # The file may be gone once this returns.
            self._followers.wait()

    def step(self) -> list[Response]:
        with self._in_lockstep():
            self._command("step")
            return super().step()

    def abort(self, uid: Uid) -> Response:
        finished = super().abort(uid)
        self._pending.append(["abort", uid])
        return finished

    def clear(self, release: bool = True) -> None:
        super().clear(release)
        if self._failure is None:
            with self._in_lockstep():
                self._command("clear", release)

    def recover(self) -> int:
        """Raise EngineError after any failure: processes that are out of step cannot be brought together."""
        if self._failure is not None:
            raise self._failure
        return super().recover()

    def _accept(self, row: Row) -> None:
        super()._accept(row)
        self._pending.append(["add", plain_request(row.request)])

    def _command(self, name: str, *arguments: Any) -> None:
        self._followers.send([*self._pending, [name, *arguments]])
        self._pending.clear()

    @contextmanager
    def _in_lockstep(self) -> Iterator[None]:
        """Mark the engine as failed where anything inside fails: its processes are out of step then."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except Exception as error:
            self._failure = EngineError(self._followers.describe_end(error))
            raise self._failure from error


def execute(engine: EmbeddedEngine, commands: Sequence[Command]) -> bool:
    """Repeat the leader's commands; returns True where the leader waits for an acknowledgement."""
    asked = False
    for name, *arguments in commands:
        if name == "add":
            engine.add(request_of(*arguments))
        elif name == "abort":
            engine.abort(tuple(*arguments))
        elif name == "clear":
            engine.clear(*arguments)
        elif name == "publish":
            version, path = arguments
            engine.publish(version, WeightFile(path))
            asked = True
        else:
            assert name == "step", name
            engine.step()
    return asked
