"""The embedded engine: decodes many rows at once with the trainer's own module, and needs nothing but torch.

add ──▶ waiting ──free slot──▶ slots ──step──▶ a token for each ──stop, limit──▶ Finished
           |                     ▲                                                  |
           └── prompt, computed ─┘                                    its slot is filled in the next step
               once for all rows that share it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from braidrl.errors import UserError
from braidrl.rollout.batch import SlotBatch
from braidrl.rollout.engine import WeightSource
from braidrl.rollout.native.decoder import native_decoder
from braidrl.rollout.prompts import ROW_MULTIPLE
from braidrl.rollout.requests import Finished, Request, Uid
from braidrl.rollout.row import Row
from braidrl.rollout.slots import round_up
from braidrl.rollout.stopping import StopTexts
from braidrl.rollout.weights import EngineWeights


class EmbeddedEngine:
    """Generates with `model`, which stays the trainer's.

    `slots` rows are decoded at once, rounded up to a multiple of 16. `max_sequence_tokens` limits prompt and response together.
    With another `dtype` than the model's the engine has a copy of the weights, refreshed by `publish`. `shrink` lets steps get
    smaller when few rows are left; by default on the CPU, where it does not change a bit. `compile` is `rollout.compile`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        slots: int,
        max_sequence_tokens: int,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        shrink: bool | None = None,
        compile: bool = True,
    ) -> None:
        self._weights = EngineWeights(model, dtype)
        self._tokenizer = tokenizer
        self._max_sequence_tokens = max_sequence_tokens
        self._end_ids = end_of_sequence_ids(model, tokenizer)
        shrink = model.device.type == "cpu" if shrink is None else shrink
        native = native_decoder(self._weights.model) if compile else None
        self._batch = SlotBatch(self._weights.model, round_up(slots, ROW_MULTIPLE), seed, shrink, native)
        self._waiting: deque[Row] = deque()
        self._under_way: set[Uid] = set()
        self.version = 0
        self.rows_done = 0
        self.tokens_generated = 0

    @property
    def slots(self) -> int:
        """Rows that can be decoded at once."""
        return self._batch.slots

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return self._max_sequence_tokens

    @property
    def in_flight(self) -> int:
        """Rows that are being decoded."""
        return len(self._batch.rows)

    @property
    def waiting(self) -> int:
        """Rows that have no slot yet."""
        return len(self._waiting)

    @property
    def prompt_tokens_computed(self) -> int:
        """Prompt tokens that went through the model, each shared prompt counted once."""
        return self._batch.prompts.computed_tokens

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        """The weights are those of `version` from now on. Rows under way go on with them; their earlier tokens keep their version.

        They are the trainer's, or those of a `source`. Raises ValueError where it lacks a tensor, and changes nothing then.
        """
        self._weights.refresh(source)
        self._batch.version_changed(version)
        self.version = version

    def generate(
        self, requests: Iterable[Request], on_finished: Callable[[Finished], None] | None = None
    ) -> list[Finished]:
        """All responses, in the order of `requests`; `on_finished` is told each as it ends.

        Raises UserError for a prompt that leaves no room for a response, and RuntimeError while rows are under way.
        """
        if self._under_way:
            raise RuntimeError(f"{len(self._under_way)} rows are under way; step until they end, or clear them")
        order = []
        finished: dict[Uid, Finished] = {}
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
        finally:
            self.clear()
        return [finished[uid] for uid in order]

    def add(self, request: Request) -> None:
        """Lets a request wait for a slot. Raises UserError for a prompt that leaves no room for a response."""
        sampling, length = request.sampling, len(request.prompt)
        if request.uid in self._under_way:
            raise ValueError(f"row {request.uid} is under way already")
        room = self._max_sequence_tokens - length
        if room < 1:
            raise UserError(
                f"row {request.uid}: a prompt of {length} tokens leaves no room for a response in a sequence of "
                f"{self._max_sequence_tokens}; shorten it or raise the limit"
            )
        ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *(self._end_ids if sampling.ends else ()))))
        texts = StopTexts(self._tokenizer, sampling.stop) if sampling.stop else None
        row = Row(request, min(sampling.max_tokens, room), ids, texts)
        self._batch.expect(row)
        self._under_way.add(request.uid)
        self._waiting.append(row)

    def step(self) -> list[Finished]:
        """Fills free slots, draws one token for every row that has one, and gives back those that ended."""
        with self._decoding():
            if self._waiting:
                count = min(self.waiting, len(free := self._batch.free()))
                if count:
                    self._batch.begin({slot: self._waiting.popleft() for slot in free[:count]}, self.version)
            if not self.in_flight:
                return []
            self.tokens_generated += self.in_flight
            return self._done(self._batch.take(self._batch.step()))

    def abort(self, uid: Uid) -> Finished:
        """Ends a row at once with what it has. Raises KeyError when it is not under way."""
        for slot, row in self._batch.rows.items():
            if row.request.uid == uid:
                return self._done(self._batch.take([slot], aborted=True))[0]
        for row in self._waiting:
            if row.request.uid == uid:
                self._waiting.remove(row)
                self._batch.prompts.forget(row.request.prompt)
                nothing = torch.empty(0, dtype=torch.int64)
                log_probs = nothing.to(self._batch.log_prob_dtype)
                return self._done([row.finished(nothing, log_probs, aborted=True)])[0]
        raise KeyError(f"row {uid} is not under way")

    def clear(self) -> None:
        """Drops every row and gives the memory of keys and values back."""
        for row in self._waiting:
            self._batch.prompts.forget(row.request.prompt)
        self._waiting.clear()
        self._under_way.clear()
        self._batch.clear()

    def _done(self, finished: list[Finished]) -> list[Finished]:
        self._under_way.difference_update(row.uid for row in finished)
        self.rows_done += len(finished)
        return finished

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """No gradients and no activation checkpointing; the module's mode is as before afterwards."""
        model = self._weights.model
        training = model.training
        if training:
            model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            if training:
                model.train()


def end_of_sequence_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What ends a response of this model: the tokenizer's end of sequence, and those of its generation configuration."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(token for token in (tokenizer.eos_token_id, *several) if token is not None))
