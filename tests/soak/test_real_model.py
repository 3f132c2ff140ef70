"""The sums of examples/smollm2 under every runtime, and with vLLM generating: one flow, one result, with a real
language model.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest

from braidrl.config import load_config
from braidrl.observe.metrics import read_metrics
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import rollout_path
from braidrl.runtimes.restarts import train
from tests.engines.served import vllm_python
from tests.tiny import ROOT, load_module

SMOLLM2 = ROOT / "examples" / "smollm2"
STEPS, PROMPTS, SAMPLES = 5, 8, 8
RUNS = {
    "eager": [],
    "hybrid": ["runtime=hybrid", "workers=2"],
    "distributed": ["runtime=distributed", "workers=2"],
    "streaming": ["runtime=streaming"],
    "vllm": ["rollout.engine=vllm", "rollout.engines=1", "rollout.reproducible=true"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the finished run of each kind."""
    fetching = load_module(SMOLLM2 / "fetch.py")
    try:
        model = fetching.fetch()
    except fetching.Unavailable as error:
        pytest.skip(str(error))
    folder, result = tmp_path_factory.mktemp("real"), {}
    trained, _ = load_module(SMOLLM2 / "tasks.py").sums()
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(example) + "\n" for example in trained))
    for name, overrides in RUNS.items():
        if name == "vllm" and (python := vllm_python()) is not None:
            overrides = [*overrides, f"rollout.python={python}"]
        result[name] = train(
            load_config(
                SMOLLM2 / "sums.yaml",
                [
                    f"model={model}",
                    f"data.train={data}",
                    "data.eval={}",
                    "evaluation.every=0",
                    f"output={folder}",
                    f"name={name}",
                    "threads=1",
                    f"trainer.steps={STEPS}",
                    f"trainer.prompts_per_step={PROMPTS}",
                    f"rollout.samples_per_prompt={SAMPLES}",
                    "trainer.max_tokens_per_device=2048",
                    f"rollout.slots={PROMPTS * SAMPLES}",
                    *overrides,
                ],
            )
        )
    return result


def prompts_of(run: Path) -> list[list[str]]:
    """Return the questions of each step."""
    return [
        sorted(fields["prompt"] for fields in read_rollouts(rollout_path(run, step))["metadata"])
        for step in range(1, STEPS + 1)
    ]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", RUNS)
def test_runtime_trains_on_same_prompts_and_generated_tokens(runs: dict[str, Path], name: str) -> None:
    lines, eager = read_metrics(runs[name]), read_metrics(runs["eager"])
    assert prompts_of(runs[name]) == prompts_of(runs["eager"])
    gap = max(line["train/rollout_log_prob_gap"] for line in lines)
    rewards = [[line["reward/mean"] for line in result] for result in (lines, eager)]
    print(f"{name}: gap {gap:.1e} nats, rewards {' '.join(f'{reward:.3f}' for reward in rewards[0])}")
    assert gap < 1e-4
    noise = (sum(max(stdev(result), 0.01) ** 2 for result in rewards) / STEPS) ** 0.5
    assert abs(fmean(rewards[0]) - fmean(rewards[1])) < 4 * noise
