"""Work that takes a given time per token instead of computing: an engine with slots, a loss and a flow, as plug-ins of
a run.

braid train config.yaml flow=benchmarks/streaming/sleeping.py:sleeping
rollout.engine=benchmarks/streaming/sleeping.py:SleepingEngine
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from braidrl.algorithms.random import uniform
from braidrl.algorithms.registry import advantages, losses, selections
from braidrl.data.rows import FinishReason, Uid
from braidrl.data.token_columns import LOG_PROBS, VERSIONS
from braidrl.engines.engine import EngineSpec
from braidrl.engines.requests import EngineRow, Response
from braidrl.engines.stepping import SteppingEngine
from braidrl.flow import Flow, actor, advantage, loss, select
from braidrl.training.pretrained import load_tokenizer
from braidrl.weights.publisher import WeightSource
from tests.plan.durations import long_tailed

TOKEN = 5
"""The token that all responses consist of."""


@dataclass
class Sleeping:
    """A row, its remaining tokens, and its tokens so far with their versions."""

    row: EngineRow
    left: int
    versions: list[int]


class SleepingEngine(SteppingEngine):
    """Engine with a given time per token, whatever the number of rows; responses have log-normal lengths, fixed by
    their uids.
    """

    slots = 0

    def __init__(self, spec: EngineSpec) -> None:
        """Take `token_s`, `load_s`, `median`, `longest` and `among` from `rollout.engine_settings`."""
        super().__init__(load_tokenizer(spec.model), (), spec.max_sequence_tokens, spec.seed)
        own: dict[str, Any] = spec.options
        self.slots, self.token_s, self.load_s = spec.slots, own["token_s"], own["load_s"]
        self.length = long_tailed(0, own["median"], own["longest"], own["among"])
        self.rows: dict[Uid, Sleeping] = {}
        self.queue: list[Sleeping] = []
        self.next_token = 0.0

    @property
    def in_flight(self) -> int:
        return len(self.rows)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        time.sleep(self.load_s)
        self.version = version

    def _accept(self, row: EngineRow) -> None:
        left = round(self.length(row.request.uid)) - row.request.first_draw
        self.queue.append(Sleeping(row, max(1, left), []))

    def step(self) -> list[Response]:
        """Sleep until the next token is due. Other work of the worker runs in this time, as beside a GPU."""
        while self.queue and len(self.rows) < self.slots:
            started = self.queue.pop(0)
            self.rows[started.row.request.uid] = started
        now = time.monotonic()
        self.next_token = max(now, self.next_token + self.token_s)
        time.sleep(self.next_token - now)
        for sleeping in self.rows.values():
            sleeping.versions.append(self.version)
            sleeping.left -= 1
        ended = [uid for uid, sleeping in self.rows.items() if not sleeping.left]
        return self._done([response(self.rows.pop(uid), FinishReason.STOP) for uid in ended])

    def abort(self, uid: Uid) -> Response:
        found = self.rows.pop(uid, None) or next((s for s in self.queue if s.row.request.uid == uid), None)
        if found is None:
            raise KeyError(f"row {uid} is not under way")
        self.queue = [sleeping for sleeping in self.queue if sleeping is not found]
        return self._done([response(found, FinishReason.ABORT)])[0]

    def clear(self, release: bool = True) -> None:
        self.rows, self.queue = {}, []
        self._under_way.clear()


def response(sleeping: Sleeping, reason: FinishReason) -> Response:
    """Return a row's response so far."""
    versions = torch.tensor(sleeping.versions, dtype=torch.int64)
    per_token = {LOG_PROBS: torch.zeros(len(versions)), VERSIONS: versions}
    return Response(sleeping.row.request.uid, torch.full_like(versions, TOKEN), reason, per_token)


@advantages.register(writes=["advantage"])
def alike(length: Tensor) -> Tensor:
    """Return 1 for each row, (B,)."""
    return torch.ones(len(length))


@advantages.register(writes=["advantage"], scope="batch", sums=lambda length: {"rows": torch.tensor(len(length))})
def alike_in_a_batch(length: Tensor, *, totals: dict[str, Tensor]) -> Tensor:
    """Return 1 for each row, (B,), once the whole batch is there: training begins when generation has ended."""
    return torch.ones(len(length))


def is_kept(group: int) -> bool:
    """Return whether a group is kept; half of the groups are, at random."""
    return float(uniform(0, "keep", group)) < 0.5


@selections.register(scope="group")
def half_of_the_groups(length: Tensor, group: Tensor) -> dict[int, str]:
    """Drop half of the groups, by number (B,), once every `length` (B,) of a group is known."""
    return {number: "the other half" for number in group.unique().tolist() if not is_kept(number)}


class GivenTime:
    """Makes work take a given time; computation since the last sleep counts as part of it, as beside a GPU."""

    computed_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep for the rest of the given seconds."""
        time.sleep(max(0.0, seconds - (time.thread_time() - self.computed_s)))
        self.computed_s = time.thread_time()


TRAINING = GivenTime()


@losses.register()
def slept(log_probs: Tensor, advantages: Tensor, *, token_s: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Take `token_s` for each token of a micro-batch; return 0 for each token, (N,)."""
    TRAINING.sleep(token_s * len(log_probs))
    return 0.0 * log_probs * advantages, {}


class SleepingParameters(BaseModel):
    """Settings of the flow."""

    token_s: float = Field(0.0, ge=0)
    in_turn: bool = False
    selects: bool = False


def sleeping(p: SleepingParameters) -> Flow:
    """Generate and train, one after the other with `in_turn`; with `selects`, half of the groups are dropped in
    between.
    """
    middle = advantage.alike_in_a_batch() if p.in_turn else advantage.alike()
    chosen = [select.half_of_the_groups()] if p.selects else []
    return Flow("sleeping", [actor.generate(), *chosen, middle, actor.update(loss=loss.slept(token_s=p.token_s))])
