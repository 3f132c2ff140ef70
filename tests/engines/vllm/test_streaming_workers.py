"""Streaming with vLLM over two tensor ranks: new weights reach its workers between rows and in the middle of them."""

from __future__ import annotations

from typing import Any

import pytest

from braidrl.observe.metrics import read_metrics
from tests.engines.served import vllm_python
from tests.engines.vllm.hosted_runs import write_wide_model
from tests.tiny import Workshop, recorded

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
STEPS = 6


def streamed(weights: str) -> dict[str, Any]:
    python = vllm_python()
    return {
        "runtime": "streaming", "algorithm": {"old": "recompute"},
        # While one engine of `rolling` loads, another one generates.
        "streaming": {"weights": weights, "workers": {"actor.generate": 2 if weights == "rolling" else 1}},
        "rollout": {
            # Two rows at a time, so that some are always under way when a version is published.
            "engine": "vllm", "tensor": 2, "weights": "collective", "max_response_tokens": 40, "samples_per_prompt": 2, "slots": 2,
            **({"python": str(python)} if python else {}),
        },
        "trainer": {"steps": STEPS, "prompts_per_step": 4, "rows_per_update": 8, "max_staleness": 1},
    }  # fmt: skip


@pytest.mark.parametrize("weights", ["rolling", "interrupt"])
def test_each_token_has_the_log_prob_of_the_version_that_drew_it(workshop: Workshop, weights: str) -> None:
    workshop.model = write_wide_model(workshop.folder / "wide")
    folder = workshop.run(weights, **streamed(weights))
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, STEPS + 1))
    rows = [recorded(folder, step) for step in range(1, STEPS + 1)]
    versions = [set(own["rollout_versions"][row].tolist()) for own in rows for row in range(len(own))]
    assert max(max(own) for own in versions) >= STEPS - 2
    # Gaps of one version are rounding; a row that was begun before the last update differs from the trainer's newest weights.
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
