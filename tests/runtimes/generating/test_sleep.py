"""Engines sleep while something else uses the device, and wake with the weights of their version."""

from __future__ import annotations

from typing import Any

import pytest

from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.engines.vllm.sleeping import PARTS, VllmMemory
from braidrl.runtimes.controller import SerialController
from braidrl.runtimes.generating.generation import requests_of
from braidrl.runtimes.row_store import Admission
from tests.tiny import Workshop, eager_backend


def recorded(engine: Any, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an engine record its calls and still execute them."""
    for name in ("generate", "sleep", "wake", "publish"):
        method = getattr(engine, name)

        def call(*arguments: Any, own: Any = method, called: str = name, **named: Any) -> Any:
            told.append(called)
            return own(*arguments, **named)

        monkeypatch.setattr(engine, name, call)


@pytest.mark.parametrize("rollout", [{}, {"engines": 1}], ids=["in this process", "in a process of its own"])
def test_engine_sleeps_during_training_and_wakes_with_right_version(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any]
) -> None:
    backend = eager_backend(workshop.config(flow="grpo", algorithm={"kl_coef": 0.01}, rollout=rollout))
    try:
        engine, told = backend.executor.engines["actor"], list[str]()
        recorded(engine, told, monkeypatch)
        controller = SerialController(backend.config, backend.executor.flow, backend)
        results = [controller.iterate(n, n - 1) for n in (1, 2)]
        step = ["generate", "sleep", "publish"]
        assert told == [*step, "wake", *step]
        assert [set(result.batch["version"].tolist()) for result in results] == [{0}, {1}]
    finally:
        backend.close()


def test_an_embedded_engine_asleep_holds_no_keys_and_values(workshop: Workshop) -> None:
    backend = eager_backend(workshop.config(flow="grpo"))
    try:
        engine = backend.executor.engines["actor"]
        assert isinstance(engine, EmbeddedEngine)
        rows = backend.read(Admission(range(1))).rows
        engine.add(requests_of(backend.executor.flow.stages[0], rows, backend.config)[0])
        engine.step()
        assert engine._cache.capacity > 0
        with pytest.raises(RuntimeError, match="1 rows are under way"):
            engine.sleep()
        engine.clear(release=False)
        engine.sleep()
        assert engine._cache.capacity == 0
    finally:
        backend.close()


class Recorder:
    """Records the calls that vLLM would get."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def reset_prefix_cache(self) -> None:
        self.told.append("reset")

    def sleep(self, level: int) -> None:
        self.told.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.told.append(f"wake {' '.join(tags)}")


def test_vllm_wakes_weights_before_caches_and_neither_twice() -> None:
    engine = Recorder()
    memory = VllmMemory(engine, may_leave=True)
    for act in (memory.leave, memory.leave, lambda: memory.bring("weights"), lambda: memory.bring(*PARTS)):
        act()
    memory.bring(*PARTS)
    assert engine.told == ["reset", "sleep 1", "wake weights", "wake kv_cache"]
    memory.leave()
    memory.bring(*PARTS)
    assert engine.told[4:] == ["reset", "sleep 1", "wake weights", "wake kv_cache"]


def test_vllm_without_its_sleep_mode_is_asked_for_nothing() -> None:
    engine = Recorder()
    memory = VllmMemory(engine, may_leave=False)
    memory.leave()
    memory.bring(*PARTS)
    assert engine.told == []
