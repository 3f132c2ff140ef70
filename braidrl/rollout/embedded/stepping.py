"""Engines that draw one token for each of their rows in every step: what they have in common, whoever computes the step.

add ──▶ waiting ──▶ step, step, step ... ──▶ Response
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from transformers import PreTrainedTokenizerBase

from braidrl.rollout.engine import WeightSource
from braidrl.rollout.requests import Request, Response, Uid
from braidrl.rollout.row import Row, row_of


class SteppingEngine(ABC):
    """Rows under way and what is counted of them. `max_sequence_tokens` limits prompt and response together."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: tuple[int, ...], max_sequence_tokens: int, seed: int
    ) -> None:
        """`end_ids` are the tokens with which the model ends a response."""
        self.seed, self.version = seed, 0
        self.rows_done = self.tokens_generated = 0
        self._tokenizer, self._end_ids = tokenizer, end_ids
        self._max_sequence_tokens = max_sequence_tokens
        self._under_way: set[Uid] = set()

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return self._max_sequence_tokens

    @property
    @abstractmethod
    def slots(self) -> int:
        """Rows that can be decoded at once."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Rows that are being decoded."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Rows that have no slot yet."""

    @abstractmethod
    def publish(self, version: int, source: WeightSource | None = None) -> None:
        """The weights are those of `version` from now on. Rows under way go on with them; their earlier tokens keep their version.

        They are the trainer's, or those of a `source`. Raises ValueError where it lacks a tensor, and changes nothing then.
        """

    @abstractmethod
    def step(self) -> list[Response]:
        """Draws one token for every row that has a slot, and gives back those that ended."""

    @abstractmethod
    def abort(self, uid: Uid) -> Response:
        """Ends a row at once with what it has. Raises KeyError when it is not under way."""

    @abstractmethod
    def clear(self, release: bool = True) -> None:
        """Drops every row and gives the memory of keys and values back; without `release` an engine may keep what it will need again."""

    def recover(self) -> int:
        """Makes an engine that failed ready, and returns the version of its weights. Raises EngineError when it cannot."""
        return self.version

    def generate(
        self,
        requests: Iterable[Request],
        on_finished: Callable[[Response], None] | None = None,
        to_end: Callable[[], Iterable[Uid]] | None = None,
    ) -> list[Response]:
        """All responses, in the order of `requests`; `on_finished` is told each that ends by itself.

        `to_end` is asked after each step for rows that are to end with what they have; it may name some that have ended.

        Raises UserError for a prompt that leaves no room for a response, and RuntimeError while rows are under way.
        """
        if self._under_way:
            raise RuntimeError(f"{len(self._under_way)} rows are under way; step until they end, or clear them")
        order = []
        finished: dict[Uid, Response] = {}
        try:
            for request in requests:
                self.add(request)
                order.append(request.uid)
            with self._decoding():
                while self._under_way:
                    for row in self.step():
                        finished[row.uid] = row
                        if on_finished:
                            on_finished(row)
                    for uid in to_end() if to_end else ():
                        if uid in self._under_way:
                            finished[uid] = self.abort(uid)
        finally:
            self.clear(release=False)
        return [finished[uid] for uid in order]

    def add(self, request: Request) -> None:
        """Lets a request wait for a slot. Raises UserError for a prompt that leaves no room for a response."""
        if request.uid in self._under_way:
            raise ValueError(f"row {request.uid} is under way already")
        self._accept(row_of(request, self._tokenizer, self._end_ids, self._max_sequence_tokens))
        self._under_way.add(request.uid)

    @abstractmethod
    def _accept(self, row: Row) -> None:
        """Lets a row that can be answered wait for a slot."""

    def _done(self, finished: list[Response]) -> list[Response]:
        self._under_way.difference_update(row.uid for row in finished)
        self.rows_done += len(finished)
        return finished

    def _decoding(self) -> AbstractContextManager[None]:
        """What holds while steps are taken."""
        return nullcontext()
