"""The embedded engine: decodes many rows at once with the trainer's own module, and needs nothing but torch.

    add ──▶ waiting ──free slot──▶ slots ──step──▶ a token for each ──stop, limit──▶ Finished
               |                     ▲                                                  |
               └── prompt, computed ─┘                                    its slot is filled in the next step
                   once for all rows that share it

All slots take part in every step, idle ones to no effect, so that a row's numbers do not depend on its company. When fewer
rows are left than slots, the step shrinks in multiples of 16 rows: from 16 on, a CPU's matrix products give each row the
same bits whatever the number of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from braidrl.data.rows import FinishReason
from braidrl.errors import UserError
from braidrl.rollout.prompts import ROW_MULTIPLE, Prompts, name_of
from braidrl.rollout.requests import Finished, Request, Uid
from braidrl.rollout.sampling import sample
from braidrl.rollout.slots import SlotCache, SlotStep, round_up
from braidrl.rollout.states import Row, SlotStates
from braidrl.rollout.stopping import StopTexts
from braidrl.rollout.weights import EngineWeights


class EmbeddedEngine:
    """Generates with `model`, which stays the trainer's.

    `slots` rows are decoded at once, rounded up to a multiple of 16. `max_sequence_tokens` limits prompt and response together.
    With another `dtype` than the model's the engine has a copy of the weights, refreshed by `publish`. `shrink` lets steps get
    smaller when few rows are left; by default on the CPU, where it does not change a bit.
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
    ) -> None:
        self._weights = EngineWeights(model, dtype)
        self._tokenizer = tokenizer
        self._slots = round_up(slots, ROW_MULTIPLE)
        self._max_sequence_tokens = max_sequence_tokens
        self._seed = seed
        self._end_ids = end_of_sequence_ids(model, tokenizer)
        model = self._weights.model
        self._shrink = model.device.type == "cpu" if shrink is None else shrink
        self._cache = SlotCache(model.config, self._slots, model.dtype, model.device)
        self._prompts = Prompts(self._cache)
        self._waiting: deque[Row] = deque()
        self._under_way: set[Uid] = set()
        self._rows: dict[int, Row] = {}
        self._positions, self._response_tokens, self._stop_tokens = 0, 1, 1
        self._forget()
        self.version = 0
        self.rows_done = 0
        self.tokens_generated = 0

    @property
    def in_flight(self) -> int:
        """Rows that are being decoded."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Rows that have no slot yet."""
        return len(self._waiting)

    @property
    def prompt_tokens_computed(self) -> int:
        """Prompt tokens that went through the model, each shared prompt counted once."""
        return self._prompts.computed_tokens

    def publish(self, version: int) -> None:
        """The weights are those of `version` from now on. Rows under way go on with them; their earlier tokens keep their version."""
        self._weights.refresh()
        self._prompts.discard()
        self.version = version
        for slot, row in self._rows.items():
            row.versions.append((int(self._states.drawn[slot]), version))

    def generate(
        self, requests: Iterable[Request], on_finished: Callable[[Finished], None] | None = None
    ) -> list[Finished]:
        """All responses, in the order of `requests`; `on_finished` is told each as it ends.

        Raises UserError for a prompt that leaves no room for a response.
        """
        order = []
        finished: dict[Uid, Finished] = {}
        try:
            for request in requests:
                self.add(request)
                order.append(request.uid)
            with self._decoding():
                while self._rows or self._waiting:
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
        self._positions = max(self._positions, length + row.limit - 1)
        self._response_tokens = max(self._response_tokens, row.limit)
        self._stop_tokens = max(self._stop_tokens, len(ids))
        self._under_way.add(request.uid)
        self._waiting.append(row)
        self._prompts.expect(request.prompt)

    def step(self) -> list[Finished]:
        """Fills free slots, draws one token for every row that has one, and gives back those that ended."""
        with self._decoding():
            self._fill()
            if not self._rows:
                return []
            self._fit()
            return self._harvest(self._decode())

    def abort(self, uid: Uid) -> Finished:
        """Ends a row at once with what it has. Raises KeyError when it is not under way."""
        for slot, row in self._rows.items():
            if row.request.uid == uid:
                return self._take([slot], {slot: FinishReason.ABORT})[0]
        for row in self._waiting:
            if row.request.uid == uid:
                self._waiting.remove(row)
                self._under_way.remove(uid)
                self._prompts.forget(row.request.prompt)
                nothing = torch.empty(0, dtype=torch.int64)
                return Finished(uid, nothing, self._states.log_probs.new_empty(0).cpu(), FinishReason.ABORT, nothing)
        raise KeyError(f"row {uid} is not under way")

    def clear(self) -> None:
        """Drops every row and gives the memory of keys and values back."""
        for row in self._waiting:
            self._prompts.forget(row.request.prompt)
        self._waiting.clear()
        self._under_way.clear()
        self._rows.clear()
        self._forget()
        self._cache.release()

    def _forget(self) -> None:
        """All slots idle, and no room asked for yet."""
        self._positions, self._response_tokens, self._stop_tokens = 0, 1, 1
        dtype = torch.promote_types(self._weights.model.dtype, torch.float32)
        self._states = SlotStates.idle(self._slots, 1, 1, dtype, self._weights.model.device)
        self._steps = 0
        self._changed()

    def _changed(self) -> None:
        """Derives anew what depends on which rows are in which slots."""
        top = round_up(max(self._rows, default=0) + 1, ROW_MULTIPLE) if self._shrink else self._slots
        self._active = self._states.first(top)
        self._choice = self._active.choice([row.request.sampling for row in self._rows.values()])
        self._longest = max((row.length(self._steps) for row in self._rows.values()), default=0) - self._steps
        self._watched = {slot: row.stop_texts for slot, row in self._rows.items() if row.stop_texts}

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

    def _fill(self) -> None:
        """Gives free slots to rows that wait, computing the prompts that have not been."""
        free = [slot for slot in range(self._slots) if slot not in self._rows] if self._waiting else []
        if not free:
            return
        self._cache.reserve(self._positions)
        self._states = self._states.with_room(self._response_tokens, self._stop_tokens)
        new = dict(zip(free, (self._waiting.popleft() for _ in free[: len(self._waiting)]), strict=False))
        self._prompts.compute(self._weights.model, (row.request.prompt for row in new.values()))
        self._place(new)
        for slot, row in new.items():
            row.begun = self._steps
            row.versions.append((0, self.version))
            self._rows[slot] = row
        self._states.begin(self._index(new), list(new.values()), self._seed)
        self._changed()

    def _place(self, new: dict[int, Row]) -> None:
        """Copies each prompt's keys and values into the slots of all rows that begin with it."""
        by_prompt: dict[bytes, list[int]] = {}
        for slot, row in new.items():
            by_prompt.setdefault(name_of(row.request.prompt), []).append(slot)
        for slots in by_prompt.values():
            prompt = new[slots[0]].request.prompt
            prefix = self._prompts.prefix(prompt)
            if prefix is not None:
                self._cache.fill(self._index(slots), prefix)
            for _ in slots:
                self._prompts.forget(prompt)

    def _fit(self) -> None:
        """Moves rows down into free slots where that makes the step smaller."""
        target = round_up(len(self._rows), ROW_MULTIPLE)
        if not self._shrink or target >= len(self._active.current):
            return
        free = (slot for slot in range(target) if slot not in self._rows)
        for source in [slot for slot in self._rows if slot >= target]:
            slot = next(free)
            row = self._rows[slot] = self._rows.pop(source)
            self._cache.move(source, slot, row.length(self._steps))
            self._states.move(source, slot)
        self._changed()

    def _decode(self) -> tuple[Tensor, Tensor]:
        """One token for each slot of the step, (B,), and whether its row ended with it, (B,)."""
        states, model = self._active, self._weights.model
        context = SlotStep(self._cache, states.position, self._longest + self._steps)
        hidden = model.base_model(
            input_ids=states.current[:, None],
            position_ids=states.position[:, None],
            use_cache=False,
            sequences=context,
        ).last_hidden_state
        logits = model.get_output_embeddings()(hidden[:, 0])
        tokens, log_probs = sample(logits, self._choice, states.uniforms())
        self._steps += 1
        self.tokens_generated += len(self._rows)
        return tokens, states.advance(tokens, log_probs)

    def _harvest(self, drawn: tuple[Tensor, Tensor]) -> list[Finished]:
        """Takes the rows that ended out of their slots."""
        tokens, ended = drawn
        slots = ended.nonzero().flatten().tolist()
        said = set()
        if self._watched:
            ids = tokens.tolist()
            said = {slot for slot, texts in self._watched.items() if texts.says_stop(ids[slot])}
        reasons = dict.fromkeys(said, FinishReason.STOP)
        slots = sorted({*slots, *said})
        return self._take(slots, reasons) if slots else []

    def _take(self, slots: list[int], reasons: dict[int, FinishReason]) -> list[Finished]:
        """What is in these slots, which become idle; the reason is STOP or LENGTH where none is given."""
        index = self._index(slots)
        tokens, log_probs = self._states.tokens[index].cpu(), self._states.log_probs[index].cpu()
        drawn = self._states.drawn[index].tolist()
        self._states.end(index)
        finished = []
        for number, slot in enumerate(slots):
            row, count = self._rows.pop(slot), drawn[number]
            ids = tokens[number, :count].clone()
            stopped = count > 0 and int(ids[-1]) in row.stop_token_ids
            reason = reasons.get(slot, FinishReason.STOP if stopped else FinishReason.LENGTH)
            versions = row.versions_of(count)
            self._under_way.remove(row.request.uid)
            finished.append(Finished(row.request.uid, ids, log_probs[number, :count].clone(), reason, versions))
        self.rows_done += len(finished)
        self._changed()
        return finished

    def _index(self, slots: Iterable[int]) -> Tensor:
        return torch.tensor(list(slots), dtype=torch.int64, device=self._states.current.device)


def end_of_sequence_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What ends a response of this model: the tokenizer's end of sequence, and those of its generation configuration."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(token for token in (tokenizer.eos_token_id, *several) if token is not None))
