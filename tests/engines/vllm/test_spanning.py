"""vLLM's engines over several nodes: the shape that each node gets, and a run over two nodes that equals the run on
one.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest
import torch

from braidrl.observe.metrics import read_metrics
from tests.engines.served import vllm_python
from tests.engines.vllm.hosted_runs import write_wide_model
from tests.runtimes.streaming.test_on_ray import RayNodes
from tests.tiny import Workshop, braid, recorded, wait_for_steps, weights_of

STEPS = 8


def streamed(nodes: int) -> dict[str, Any]:
    python = vllm_python()
    rollout: dict[str, Any] = {
        "engine": "vllm",
        "tensor": 2,
        "nodes": nodes,
        "weights": "collective",
        "reproducible": True,
        "max_response_tokens": 40,
        **({"python": str(python)} if python else {}),
    }
    trainer = {"steps": STEPS, "max_staleness": 0}
    return {"runtime": "streaming", "algorithm": {"kl_coef": 0.0}, "rollout": rollout, "trainer": trainer}


def ranks_of(process: int) -> list[psutil.Process]:
    """Processes of vLLM that hold a part of the model."""
    children = psutil.Process(process).children(recursive=True)
    return [child for child in children if "Worker_TP" in " ".join(child.cmdline())]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_run_over_two_nodes_equals_one_node_also_after_a_lost_rank(workshop: Workshop) -> None:
    workshop.model = write_wide_model(workshop.folder / "wide")
    # One CPU each, so that no two processes of the run are on one node.
    cluster = RayNodes(1, 1, 1)
    process = braid("train", workshop.config_file("two", **cluster.run(**streamed(2))))
    wait_for_steps(workshop.folder / "two", 1, process, 400)
    ranks = ranks_of(cluster.process.pid)
    parents = {rank.parent().pid for rank in ranks}  # type: ignore[union-attr]
    assert len(ranks) == len(parents) == 2, "each node starts a rank of its own"
    (second,) = (rank for rank in ranks if "Worker_TP1" in " ".join(rank.cmdline()))
    os.kill(second.pid, signal.SIGKILL)
    _, output = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "its rows go to other engines" in output
    print(*(line for line in output.splitlines() if "its rows go to" in line), sep="\n")
    cluster.close()
    one, two = workshop.run("one", **streamed(1)), workshop.folder / "two"
    for step in range(1, STEPS + 1):
        rows, others = (recorded(run, step).ordered() for run in (one, two))
        assert rows.uids() == others.uids()
        assert rows["tokens"].values.tolist() == others["tokens"].values.tolist()
    expected = weights_of(one)
    for name, tensor in weights_of(two).items():
        torch.testing.assert_close(tensor, expected[name], atol=5e-4, rtol=0)
    gaps = [line["train/rollout_log_prob_gap"] for line in read_metrics(two)]
    print(f"largest gap {max(gaps):.1e} nats")
