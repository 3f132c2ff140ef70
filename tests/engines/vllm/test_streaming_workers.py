"""Streaming with vLLM over two tensor ranks: new weights reach its workers between rows and in the middle of them, also
after a kill.
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
from tests.tiny import Workshop, braid, recorded, wait_for_steps, weights_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
STEPS = 6


def streamed(weights: str, max_staleness: int = 1) -> dict[str, Any]:
    python = vllm_python()
    return {
        "runtime": "streaming",
        "algorithm": {"old": "recompute"},
        # While one engine of `rolling` loads, another one generates.
        "streaming": {"weights": weights, "workers": {"actor.generate": 2 if weights == "rolling" else 1}},
        "rollout": {
            # Two long rows at a time: when a batch's last one ends and the batch is trained on, the other is under way.
            # With one slot a quick trainer publishes before the next row has a token.
            "engine": "vllm",
            "tensor": 2,
            "weights": "collective",
            "samples_per_prompt": 2,
            "slots": 2,
            "max_response_tokens": 200 if max_staleness else 40,
            "reproducible": not max_staleness,
            **({"python": str(python)} if python else {}),
        },
        "trainer": {
            "steps": STEPS,
            "prompts_per_step": 4,
            "rows_per_update": 8,
            "max_staleness": max_staleness,
            "checkpoint_every": 0 if max_staleness else 2,
        },
    }


@pytest.mark.parametrize("weights", ["rolling", "interrupt"])
def test_each_token_has_the_log_prob_of_the_version_that_drew_it(workshop: Workshop, weights: str) -> None:
    workshop.model = write_wide_model(workshop.folder / "wide")
    folder = workshop.run(weights, **streamed(weights))
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, STEPS + 1))
    rows = [recorded(folder, step) for step in range(1, STEPS + 1)]
    versions = [set(own["rollout_versions"][row].tolist()) for own in rows for row in range(len(own))]
    assert max(max(own) for own in versions) >= STEPS - 2
    # Gaps of one version are rounding; a row that was started before the last update differs from the trainer's newest
    # weights.
    current = [
        float((own["rollout_log_probs"][row] - own["old_log_probs"][row]).abs().max())
        for step, own in enumerate(rows, 1)
        for row in range(len(own))
        if set(own["rollout_versions"][row].tolist()) == {step - 1}
    ]
    print(f"{weights}: {sum(len(own) > 1 for own in versions)} of {len(versions)} rows have tokens of two versions")
    assert current and max(current) < 1e-4
    if weights == "interrupt":
        assert any(len(own) > 1 for own in versions)


@pytest.mark.parametrize("weights", ["rolling", "interrupt"])
def test_a_run_equals_the_embedded_engines_after_an_engine_and_the_run_are_killed(
    workshop: Workshop, weights: str
) -> None:
    workshop.model = write_wide_model(workshop.folder / "wide")
    settings = streamed(weights, max_staleness=0)
    process = braid("train", workshop.config_file(weights, **settings))
    folder = workshop.folder / weights
    wait_for_steps(folder, 1, process)
    workers = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "Worker_TP" in " ".join(child.cmdline())
    ]
    assert len(workers) == (4 if weights == "rolling" else 2)
    # The engine alone ends, and another process replaces it; then the whole run.
    workers[-1].kill()
    wait_for_steps(folder, 3, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    again = braid("train", "--resume", folder)
    _, output = again.communicate(timeout=400)
    assert again.returncode == 0, output
    kept = ("algorithm", "trainer")
    drawn = {
        name: own for name, own in settings["rollout"].items() if name in ("max_response_tokens", "samples_per_prompt")
    }
    alone = workshop.run("alone", rollout=drawn, **{name: settings[name] for name in kept})
    for step in range(1, STEPS + 1):
        one, other = (recorded(run, step).ordered() for run in (folder, alone))
        assert one.uids() == other.uids()
        assert one["tokens"].values.tolist() == other["tokens"].values.tolist()
    assert max(line["train/rollout_log_prob_gap"] for line in read_metrics(folder)) < 1e-5
    expected = weights_of(alone)
    for name, tensor in weights_of(folder).items():
        torch.testing.assert_close(tensor, expected[name], atol=5e-4, rtol=0)
