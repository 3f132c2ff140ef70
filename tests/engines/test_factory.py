"""Runs with engines in separate processes: the same rows, the trainer's weights after every step, and an error if
weights diverge.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from braidrl.cluster.devices import Devices, assign_devices
from braidrl.cluster.process_groups import open_store
from braidrl.engines.engine import EngineSpec, NodePart
from braidrl.engines.factory import engine_spec, engines_of, with_nodes
from braidrl.engines.routing.router import EngineService
from braidrl.engines.spanning import SpanningEngine
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.prepare.deployment import deploy
from braidrl.runtimes.prepare.run_flow import build_flow
from braidrl.runtimes.step_metrics import GAP, GapWatch
from braidrl.training.parallel.layouts import DataParallel
from tests.engines.served import vllm_python
from tests.invariants.traces import assert_same_weights
from tests.tiny import SIZES, TOKENIZER, Workshop, recorded, weights_of

SERVER = "http://127.0.0.1:9"
TRAINER = {"steps": 3, "learning_rate": 3e-3}


def tokens_of(run: Path, steps: int) -> list[list[list[float]]]:
    return [recorded(run, step)["tokens"].tolist() for step in range(1, steps + 1)]


def gaps_of(run: Path, steps: int) -> list[float]:
    """Return the largest gap between the engine's and the trainer's log-probs for each row of a run that recomputed
    them.
    """
    result = []
    for step in range(1, steps + 1):
        rows = recorded(run, step)
        ours, theirs = rows["old_log_probs"], rows["rollout_log_probs"]
        result += [float((ours[row] - theirs[row]).abs().max()) for row in range(len(rows))]
    print(f"{len(result)} rows, largest gap {max(result):.1e} nats")
    return result


@pytest.mark.parametrize(
    ("runtime", "processes", "weights"),
    [
        ("eager", 2, {"weights": "collective"}),
        pytest.param("hybrid", 1, {}, marks=pytest.mark.soak),
    ],
)
def test_engine_processes_give_the_result_of_the_trainers_own_engine(
    workshop: Workshop, request: pytest.FixtureRequest, runtime: str, processes: int, weights: dict[str, Any]
) -> None:
    if runtime == "hybrid":
        request.getfixturevalue("warm_cluster")
    alone = workshop.run("alone", trainer=TRAINER)
    served = workshop.run("served", trainer=TRAINER, runtime=runtime, rollout={"engines": processes, **weights})
    assert tokens_of(served, 3) == tokens_of(alone, 3)
    assert_same_weights(weights_of(served), weights_of(alone))
    assert all(line[GAP] < 1e-5 for line in read_metrics(served))


@pytest.mark.soak
def test_a_vllm_run_has_the_trainers_log_probs_and_sleeps_between_steps(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    torch.manual_seed(0)
    # The narrowest heads that vLLM supports on a CPU.
    config = Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(workshop.folder / "wide")
    TOKENIZER.save_pretrained(workshop.folder / "wide")
    python = vllm_python()
    own: dict[str, Any] = {"python": str(python)} if python else {}
    settings = {"model": str(workshop.folder / "wide"), "trainer": TRAINER, "algorithm": {"old": "recompute"}}
    run = workshop.run(
        "vllm", **settings, rollout={"engine": "vllm", "reproducible": True, "vllm": {"enable_sleep_mode": True}, **own}
    )
    output = "".join(capfd.readouterr())
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert max(gaps_of(run, 3)) < 1e-5
    assert [recorded(run, step)["version"].unique().tolist() for step in (1, 2, 3)] == [[0], [1], [2]]
    # vLLM's own calls: sleep after generation, wake weights for the next rows, wake caches for the next rows.
    waking = re.findall(r"seconds to (fall asleep|wake up tags \['weights'\]|wake up tags \['kv_cache'\])", output)
    step = ["fall asleep", "wake up tags ['weights']", "wake up tags ['kv_cache']"]
    assert waking == (3 * step)[:-1]
    assert tokens_of(run, 1) == tokens_of(workshop.run("embedded", **settings), 1), (
        "sampling depends on the row, not on the engine"
    )


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_ends_with_an_explanation_when_weights_do_not_arrive(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """Even where the configuration would allow stale rows, because this runtime produces none."""
    monkeypatch.setattr(EngineService, "publish", lambda service, version, source: None)
    trainer = {"steps": 4, "learning_rate": 3e-2, "max_staleness": staleness}
    with pytest.raises(UserError, match=r"step 2: engine and trainer.*nats apart"):
        workshop.run("lost", trainer=trainer, rollout={"engines": 1})
    assert not (workshop.folder / "lost" / "checkpoints").exists()


def test_a_log_prob_gap_that_jumps_or_exceeds_its_limit_ends_the_run() -> None:
    watch = GapWatch(limit=0.2)
    for step, gap in enumerate([1e-6, 2e-6, 0.009, 0.15]):
        watch.check({"step": step, GAP: gap})
    watch.check({"step": 5, GAP: None})
    with pytest.raises(UserError, match=r"step 6: .*0.21 nats.* 0.15 at"):
        watch.check({"step": 6, GAP: 0.21})
    jumping = GapWatch(limit=0.2)
    jumping.check({"step": 1, GAP: 1e-6})
    with pytest.raises(UserError, match="step 2"):
        jumping.check({"step": 2, GAP: 0.02})


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"rollout": {"engine": "vllm", "engines": 0}, "runtime": "streaming"}, "write rollout.engines=1"),
        ({"rollout": {"engine": "vlm"}}, "vllm"),
        (
            {"rollout": {"tensor": 2}},
            r"rollout.tensor=2 .*embedded engine .*write runtime=distributed",
        ),
        (
            {"rollout": {"engine": "vllm", "reproducible": True, "vllm": {"async_scheduling": True}}},
            "rollout.vllm.async_scheduling=true draws a token before",
        ),
        (
            {"rollout": {"engine": "vllm", "temperature": 0.7, "top_p": 0.9}},
            r"rollout.reproducible=false: .*temperature 0.7",
        ),
        (
            {"rollout": {"engine": "vllm", "tensor": 3}},
            r"rollout.tensor=3 .*4 attention heads",
        ),
        (
            {"rollout": {"engine": "vllm", "tensor": 2, "grouping": "interval"}},
            "rollout.grouping is for ranks",
        ),
        (
            {"rollout": {"engine": "vllm", "tensor": 2, "vllm": {"tensor_parallel_size": 4}}},
            r"vllm.tensor_parallel_size .*remove it, .*write rollout.tensor",
        ),
        (
            {"rollout": {"engine": "vllm", "vllm": {"data_parallel_size": 2}}},
            r"vllm.data_parallel_size .*remove it, .*write rollout.engines",
        ),
        (
            {"rollout": {"engine": "vllm", "vllm": {"nnodes": 2}}},
            r"vllm.nnodes .*remove it, .*write rollout.nodes",
        ),
        (
            {"rollout": {"engine": "vllm", "tensor": 2, "nodes": 2}},
            r"rollout.nodes=2 .*runtime=streaming, .*; remove it",
        ),
        (
            {"runtime": "streaming", "rollout": {"engine": "vllm", "tensor": 2, "nodes": 4}},
            r"rollout.nodes=4 .*2 ranks; .*divisor of 2",
        ),
        (
            {"runtime": "streaming", "rollout": {"engine": "vllm", "tensor": 2, "nodes": 2, "weights": "file"}},
            r"rollout.weights=file .*rollout.nodes=2; write collective",
        ),
        (
            {"runtime": "distributed", "rollout": {"engines": 1, "tensor": 2}},
            "without rollout.engines, or rollout.engine=vllm",
        ),
        ({"runtime": "distributed", "rollout": {"tensor": 4}}, r"divide .*2 key/value heads"),
        ({"rollout": {"engine": "http"}}, "name them, as in rollout.servers=http://"),
        ({"rollout": {"servers": SERVER}}, "rollout.servers are asked with rollout.engine=http"),
        (
            {"rollout": {"engine": "http", "servers": SERVER, "engines": 2}},
            "rollout.engine=http asks servers; remove it",
        ),
        ({"rollout": {"engine": "http", "servers": {"urls": SERVER, "dialect": "sgl"}}}, "sglang"),
        ({"rollout": {"engine": "http", "servers": {"urls": SERVER, "folder": "/no/folder"}}}, "there is no folder"),
        (
            {"rollout": {"engine": "http", "servers": {"urls": SERVER, "dialect": "sglang", "weights": "network"}}},
            "sglang reads a folder; remove it",
        ),
        ({"rollout": {"engine": "http", "servers": SERVER}}, r"127.0.0.1:9 .*answer: .*start it, .*correct"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_loads(
    workshop: Workshop, settings: dict[str, Any], hint: str
) -> None:
    with pytest.raises(UserError, match=hint):
        workshop.run("refused", **settings)


@pytest.mark.parametrize(
    ("available", "rollout", "expected"),
    [
        (3, {"tensor": 2}, Devices((0, 1, 2), ((1, 2),))),
        (5, {"tensor": 2, "pipeline": 2}, Devices((0, 1, 2, 3, 4), ((1, 2, 3, 4),))),
        (5, {"tensor": 2, "engines": 2}, Devices((0, 1, 2, 3, 4), ((1, 2), (3, 4)))),
        (2, {"tensor": 2}, Devices((0, 1), ((0, 1),))),
    ],
)
def test_vllm_gets_the_devices_of_its_shape(
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
    available: int,
    rollout: dict[str, Any],
    expected: Devices,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: available)
    config = workshop.config(device="cuda", rollout={"engine": "vllm", **rollout})
    deployment = deploy(config, build_flow(config))
    (devices,) = assign_devices(deployment.pools, available).values()
    assert devices == expected
    spec = engine_spec("actor", deployment)
    specs = [engine.spec for engine in engines_of("actor", DataParallel(), spec, deployment)]
    assert [spec.devices for spec in specs] == list(expected.engines)
    assert {spec.tensor * spec.pipeline for spec in specs} == {len(expected.engines[0])}


def test_vllm_without_devices_for_its_shape_is_refused(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = workshop.config(device="cuda", rollout={"engine": "vllm", "tensor": 2})
    deployment = deploy(config, build_flow(config))
    with pytest.raises(UserError, match=r"2 CUDA devices \(rank: 2\).* 1;.*`rollout.tensor`"):
        engines_of("actor", DataParallel(), engine_spec("actor", deployment), deployment)


@pytest.mark.parametrize(
    ("devices_of_node", "rollout", "nodes", "each"),
    [
        (8, {"tensor": 8}, 1, 8),
        (8, {"tensor": 16}, 2, 8),
        (8, {"tensor": 8, "pipeline": 2, "engines": 2}, 4, 4),
        (2, {"tensor": 3}, 3, 1),
        (8, {"tensor": 16, "nodes": 4}, 4, 4),
        (None, {"tensor": 16}, 1, 16),
    ],
)
def test_an_engine_spans_as_few_nodes_as_have_devices_for_it(
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
    devices_of_node: int | None,
    rollout: dict[str, Any],
    nodes: int,
    each: int,
) -> None:
    engines = rollout.get("engines", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: each * engines)
    given = workshop.config(runtime="streaming", device="cuda", rollout={"engine": "vllm", **rollout})
    flow = build_flow(given)
    deployment = deploy(with_nodes(deploy(given, flow), devices_of_node), flow)
    (pool,) = (pool for pool in deployment.pools if pool.generating)
    assert (pool.workers, pool.engine_devices, deployment.engines.nodes) == (nodes, each, nodes)
    made = engines_of("actor", DataParallel(), engine_spec("actor", deployment), deployment)
    assert [engine.spec.devices for engine in made] == [tuple(range(n * each, (n + 1) * each)) for n in range(engines)]


def test_nodes_join_each_start_of_an_engine_and_report_what_they_lose() -> None:
    store = open_store("127.0.0.1", 30.0)
    first, second = (SpanningEngine(store, NodePart(node, 2, "127.0.0.1")) for node in range(2))
    for _ in range(2):
        started = first.begin()
        joined = asyncio.run(second.next_start())
        assert joined is not None and (joined.node, joined.nodes, started.node) == (1, 2, 0)
        assert (joined.host, joined.port) == (started.host, started.port)
        assert not second.is_over() and first.lost() is None
        second.lose()
        assert first.lost() == 1
        spec = EngineSpec("vllm", "model", 4, 64, tensor=4, options={"seed": 3}, part=joined)
        options = spec.vllm_options
        assert (options["nnodes"], options["node_rank"], options["master_port"]) == (2, 1, started.port)
        assert (options["tensor_parallel_size"], options["seed"]) == (4, 3)
        assert spec.environment["VLLM_HOST_IP"] == "127.0.0.1"
    first.end()
    assert second.is_over() and asyncio.run(second.next_start()) is None
