"""One engine among several processes that each have their slices of the model: all do the same in the same order.

run ──▶ leader ──add, abort, clear ... step──▶ follower, follower, ...        within a step they meet in each layer

Drawing is deterministic, so whoever does the same draws the same tokens, and the leader's results are everybody's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from braidrl.models.parallel.decoding import Slices
from braidrl.rollout.embedded.engine import EmbeddedEngine
from braidrl.rollout.engine import EngineError, WeightSource
from braidrl.rollout.requests import Response, Uid
from braidrl.rollout.row import Row
from braidrl.rollout.weights.shared_file import WeightFile
from braidrl.rollout.wire import plain_request, request_of

Command = list[Any]
"""What is done, by name, and with what: plain values."""


class Followers(Protocol):
    """The other processes of an engine, as their leader sees them."""

    def tell(self, commands: Sequence[Command]) -> None:
        """Sends what is to be done; does not wait until it is."""

    def wait(self) -> None:
        """Returns when all have done what asks for a word. Raises RuntimeError for one that did not."""

    def describe_end(self, error: Exception) -> str:
        """Which of them ended, and how; where none did, what the leader saw."""


class LeadingEngine(EmbeddedEngine):
    """Is used as an engine that has the whole model. After a failure of any process only `EngineError` comes of it."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        slots: int,
        max_sequence_tokens: int,
        seed: int,
        slices: Slices,
        followers: Followers,
        compile: bool = True,
    ) -> None:
        super().__init__(model, tokenizer, slots, max_sequence_tokens, seed, compile=compile, slices=slices)
        self._followers = followers
        self._untold: list[Command] = []
        self._failure: EngineError | None = None

    def await_followers(self) -> None:
        """Returns when all have loaded their slices. Raises EngineError for one that did not."""
        with self._together():
            self._followers.wait()

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        """Raises ValueError also for a source that is no file: every process reads its own part."""
        if not isinstance(source, WeightFile):
            raise ValueError("an engine of several processes takes weights from a file that all of them can read")
        given = self._weights.checked(source)
        with self._together():
            self._tell("publish", version, str(source.path))
            self._weights.take(given)
            self._changed(version)
            # The file may be gone once this returns.
            self._followers.wait()

    def step(self) -> list[Response]:
        with self._together():
            self._tell("step")
            return super().step()

    def abort(self, uid: Uid) -> Response:
        finished = super().abort(uid)
        self._untold.append(["abort", uid])
        return finished

    def clear(self, release: bool = True) -> None:
        super().clear(release)
        if self._failure is None:
            with self._together():
                self._tell("clear", release)

    def recover(self) -> int:
        """Raises EngineError after any failure: processes that are at different places cannot be brought together."""
        if self._failure is not None:
            raise self._failure
        return super().recover()

    def _accept(self, row: Row) -> None:
        super()._accept(row)
        self._untold.append(["add", plain_request(row.request)])

    def _tell(self, name: str, *arguments: Any) -> None:
        self._followers.tell([*self._untold, [name, *arguments]])
        self._untold.clear()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Whatever fails here leaves the processes at different places: from then on the engine has failed."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except Exception as error:
            self._failure = EngineError(self._followers.describe_end(error))
            raise self._failure from error


def follow(engine: EmbeddedEngine, commands: Sequence[Command]) -> bool:
    """Does what the leader's engine does; True where the leader waits for a word that it is done."""
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
