"""The driver of a hybrid run sends and receives no payload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import ray
import torch

from braidrl.algorithms.ragged import Ragged
from braidrl.data.codec import encode, pack_rows, read_header
from braidrl.data.messages import CodecError, split
from braidrl.data.rows import Objects, Rows
from braidrl.observe.progress import Progress
from braidrl.runtimes.controller import SerialController
from braidrl.runtimes.hybrid.driver import start_hybrid_backend
from braidrl.runtimes.hybrid.group import WorkerGroup
from braidrl.runtimes.hybrid.handles import CallResult, Future, Part
from braidrl.runtimes.prepare.setup import without_data
from tests.runtimes.hybrid.warm import WarmCluster
from tests.tiny import Workshop


def payload_bytes(value: Any) -> int:
    """Return the bytes of payload columns in the driver's messages, encoded or not."""
    if isinstance(value, Rows):
        return sum(map(len, encode(value.only(tuple(value.payload))))) if value.payload else 0
    if isinstance(value, Ragged | Objects):
        return payload_bytes(Rows({"column": value}))
    if isinstance(value, ray.ObjectRef):
        return payload_bytes(ray.get(value))
    if isinstance(value, bytes):
        try:
            frames = split(value)
            _, headers = read_header(frames)
        except CodecError:
            return 0
        return sum(len(frame) for frame in frames) if any(header.kind != "index" for header in headers) else 0
    if is_dataclass(value):
        return sum(payload_bytes(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, Mapping):
        return payload_bytes(list(value.values()))
    return (
        sum(map(payload_bytes, value))
        if isinstance(value, Iterable) and isinstance(value, Sequence) and not isinstance(value, str)
        else 0
    )


def test_the_counter_finds_payload_in_tables_parts_and_answers() -> None:
    tokens = Rows({"score": torch.ones(1), "tokens": Ragged.from_lengths(torch.arange(3), torch.tensor([3]))})
    assert (
        payload_bytes(CallResult(result=[tokens["tokens"]])) > 24 and payload_bytes((Part(1, pack_rows(tokens)),)) > 24
    )
    assert (
        payload_bytes([CallResult(pack_rows(tokens.index)), Part(1, pack_rows(tokens.index)), "execute", tokens.index])
        == 0
    )


def test_the_driver_of_a_step_sends_and_receives_no_payload(
    workshop: Workshop, warm_cluster: WarmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: dict[str, int] = {"sent": 0, "received": 0, "calls": 0}
    result = WorkerGroup._result

    def received(group: WorkerGroup, future: Future) -> CallResult:
        answer = result(group, future)
        passed["received"] += payload_bytes(answer)
        passed["calls"] += 1
        return answer

    class CountedActor:
        """A worker whose arguments are counted."""

        def __init__(self, actor: Any, method: Any = None) -> None:
            self.actor, self.method = actor, method or actor.perform

        def __getattr__(self, name: str) -> Any:
            return getattr(self.actor, name)

        @property
        def perform(self) -> CountedActor:
            return self

        def options(self, **options: Any) -> CountedActor:
            return CountedActor(self.actor, self.method.options(**options))

        def remote(self, method: str, released: Any, count: int, *values: Any) -> Any:
            # The values after the arguments are answers of other workers, which pass from worker to worker.
            passed["sent"] += payload_bytes(list(values[:count]))
            return self.method.remote(method, released, count, *values)

    monkeypatch.setattr(WorkerGroup, "_result", received)
    config = workshop.config(
        flow="grpo",
        algorithm={"kl_coef": 0.01},
        runtime="hybrid",
        workers=2,
        rollout={"samples_per_prompt": 4},
        trainer={"prompts_per_step": 2},
    )
    prepared = without_data(config)
    backend = start_hybrid_backend(prepared, Progress(0), workshop.folder, cluster=warm_cluster)
    try:
        for group in backend.distinct:
            group.actors = [CountedActor(actor) for actor in group.actors]
        controller = SerialController(config, prepared.flow, backend)
        done = controller.iterate(1, 0)
        backend.record(workshop.folder / "1.parquet", done.table, done.final)
        assert len(done.batch) == 8
    finally:
        backend.close()
    assert passed["calls"] > 10 and passed["sent"] == passed["received"] == 0
