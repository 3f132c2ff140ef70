"""Sessions and runs work inside a running event loop, as in notebooks and asynchronous servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from braidrl.runtimes.session import Session
from tests.runtimes.turns import PLAYED
from tests.tiny import Workshop, metrics_without_times

ENVIRONMENT = {"samples_per_prompt": 4, "max_response_tokens": 6, "max_sequence_tokens": 60, "environment": PLAYED}
ENGINE = {"samples_per_prompt": 4, "max_response_tokens": 6, "engines": 1}


@pytest.mark.parametrize("rollout", [ENVIRONMENT, ENGINE], ids=["environment", "engine process"])
def test_a_run_inside_of_an_event_loop_equals_one_outside(workshop: Workshop, rollout: dict[str, Any]) -> None:
    async def main() -> Path:
        beats = asyncio.create_task(asyncio.sleep(0))
        folder = train(workshop.config("inside", rollout=rollout))
        await beats
        return folder

    inside = asyncio.run(main())
    outside = train(workshop.config("outside", rollout=rollout))
    assert len(read_metrics(inside)) == 2
    assert metrics_without_times(inside) == metrics_without_times(outside)


def test_a_session_inside_of_an_event_loop_plays_an_environment(workshop: Workshop) -> None:
    async def main() -> dict[str, float]:
        with Session(workshop.config(rollout=ENVIRONMENT)) as session:
            (rows, *_) = [session.actor.generate(rows, environment=PLAYED) for rows in session.batches()]
            assert "environment_reward" in session.index(rows) or "reward" in session.index(rows)
            return session.metrics()

    assert asyncio.run(main())


def test_a_run_in_a_thread_of_a_server_ends_as_elsewhere(workshop: Workshop) -> None:
    folder = asyncio.run(asyncio.to_thread(train, workshop.config("thread")))  # type: ignore[arg-type]
    assert (folder / "report.html").is_file()
