"""Invariant 6: the driver carries no payload and waits only for its own inputs, and roles overlap."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from braidrl.data.codec import PayloadForbidden, decode
from braidrl.flow import Flow, data
from braidrl.flow.roles import Role
from braidrl.observe.metrics import Sums
from braidrl.runtimes.hybrid.driver import HybridBackend
from braidrl.runtimes.row_store import Admission
from tests.runtimes.hybrid.backends import hybrid_crew, rehearse
from tests.runtimes.hybrid.warm import WarmCluster
from tests.tiny import Workshop, write_jsonl

ROLES = ("first", "second", "third")
THREE = Flow("three", [data.join_response(), *(Role(role).log_probs() for role in ROLES)])
NAPS = {f"{role}__log_probs": ("wait", 2.0) for role in ROLES}


def given(workshop: Workshop, tokens: int, rows: int = 8) -> dict[str, Any]:
    """Return settings for rows with given responses of this many tokens."""
    path = write_jsonl(
        workshop.folder / f"{tokens}.jsonl",
        [{"prompt": "1+1=", "response": "2" * (tokens - 5), "answer": "2"} for _ in range(rows)],
    )
    model = workshop.folder / "long-model"
    if not model.is_dir():
        shutil.copytree(workshop.model, model)
        settings = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 16_384}))
    return {
        "flow": "sft",
        "model": str(model),
        "data": {"train": str(path)},
        "runtime": "hybrid",
        "trainer": {"prompts_per_step": rows, "max_tokens_per_device": 20_000},
        "rollout": {"samples_per_prompt": 1},
    }


def all_stages(backend: HybridBackend, flow: Flow, groups: int) -> Any:
    table = backend.read(Admission(range(groups)))
    for stage in flow.stages:
        table = backend.run(stage, table, 1, Sums())
    return table


def test_payload_cannot_be_decoded_where_the_driver_runs(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    with hybrid_crew(workshop.config(**given(workshop, 16)), warm_cluster) as backend:
        table = backend.read(Admission(range(2)))
        (output,) = table.outputs
        actor = backend.home.actors[0]
        (packed,) = ray.get(actor.fetch.remote([(output.key, np.arange(2), ("prompt",))]))
        with pytest.raises(PayloadForbidden, match="'prompt' is payload"):
            decode([memoryview(frame) for frame in packed])
    assert len(decode([memoryview(frame) for frame in packed])["prompt"]) == 2


@pytest.mark.soak  # On an otherwise idle machine.
def test_roles_in_three_pools_take_as_long_as_the_longest(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    config = workshop.config(**given(workshop, 16), placement="standalone")
    with hybrid_crew(config, warm_cluster, THREE) as backend:
        rehearse(backend, **NAPS)
        start = time.perf_counter()
        table = all_stages(backend, THREE, 8)
        started = time.perf_counter() - start
        backend.index(table)
        ended = time.perf_counter() - start
    assert started < 0.5, "a call waited for its result"
    assert 2.0 <= ended <= 1.15 * 2.0


def test_roles_in_one_pool_take_turns(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    config = workshop.config(**given(workshop, 16), placement="colocate")
    with hybrid_crew(config, warm_cluster, THREE) as backend:
        rehearse(backend, **dict.fromkeys(NAPS, ("wait", 0.3)))
        start = time.perf_counter()
        backend.index(all_stages(backend, THREE, 8))
        assert time.perf_counter() - start >= 3 * 0.3


def test_workers_forget_rows_that_the_driver_has_no_handle_to(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    with hybrid_crew(workshop.config(**given(workshop, 16)), warm_cluster) as backend:
        kept, dropped = backend.read(Admission(range(2))), backend.read(Admission(range(2, 4)))
        held = lambda: ray.get(backend.home.actors[0].held.remote())  # noqa: E731
        assert held() == 2
        joined = backend.workers.prepared.flow.stages[0]
        written = backend.run(joined, dropped, 1, Sums())
        backend.index(written)
        assert held() == 3
        del dropped, written
        again = backend.read(Admission(range(4, 6)))
        assert held() == 2
        assert len(backend.index(kept)) == len(backend.index(again)) == 2


def test_rows_come_from_their_producers_and_only_those_asked_for(
    workshop: Workshop, warm_cluster: WarmCluster, tmp_path: Path
) -> None:
    """Run two producers and two consumers in other pools: no consumer gets more rows than its own."""
    config = workshop.config(**given(workshop, 16), placement="standalone", workers=2)
    flow = Flow("two", [data.join_response(), Role("first").log_probs(), Role("second").log_probs()])
    with hybrid_crew(config, warm_cluster, flow) as backend:
        rehearse(backend, **dict.fromkeys(NAPS, ("wait", 0.0)))
        table = all_stages(backend, flow, 8)
        backend.index(table)
        first, second = backend.distinct
        given_out = [ray.get(actor.given_out.remote()) for group in (first, second) for actor in group.actors]
    rows = [count for counts in given_out for count in counts]
    assert sum(rows) > 0 and max(rows) <= 8 // 2
