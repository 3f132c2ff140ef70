"""The hub's newest families train under every runtime and layout as in one process, and resume after a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import run_config
from tests.engines.served import vllm_python
from tests.invariants.traces import merged, weights
from tests.runtimes.spmd.ranks import run_in_ranks
from tests.tiny import Workshop, braid, metrics_agree, metrics_without_times, recorded, wait_for_steps
from tests.training.decoders.families import FAMILIES, FLOWS, write_family, write_pairs

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "sequence": {"sequence": 2},
    "tensor": {"tensor": 2},
    "full": {"shard": "full"},
    "pipeline": {"pipeline": 2},
    "expert": {"expert": 2},
}
REFUSED = {
    ("gpt_oss", "tensor"): "no tensor-parallel plan",
    ("gemma4_text", "tensor"): "Gemma4TextModel computes with all tokens",
    ("gemma4_text", "pipeline"): "without providing `input_ids`",
    ("qwen3_5_text", "expert"): "is for models with experts",
    ("gemma4_text", "expert"): "is for models with experts",
    ("doge", "tensor"): "tensor is not supported",
}
TOLERANCE = 1e-5
"""Parts of these models compute in float32 whatever the dtype of their weights, and Adam magnifies their rounding."""
ON_VLLM: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 64},
    "qwen3_moe": {"head_dim": 64},
    "gemma4_text": {"head_dim": 64, "global_head_dim": 64, "num_experts": None, "top_k_experts": None},
    "deepseek_v3": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "head_dim": 64,
    },
}
"""Heads as wide as vLLM needs on a CPU, where its kernel for Qwen3.5 takes bfloat16 alone.

Files of Qwen3 MoE have other names.
"""
ON_RANKS = {"qwen3_5_text": "tensor", "deepseek_v3": "tensor", "gpt2": "pipeline"}
"""Also GPT-2, whose learned positions only the first pipeline rank adds."""
BY_ROWS = {"deepseek_v32": "expert", "glm_moe_dsa": "expert"}
"""Mixtures that run once for each length of rows: ranks with fewer lengths join the exchange of tokens."""


def shop_of(folder: Path, name: str, **changes: Any) -> Workshop:
    return Workshop(folder, write_family(folder / "model", name, **changes), write_pairs(folder / "pairs.jsonl"))


def assert_same_run(ours: Path, theirs: Path, rounded: bool = False) -> None:
    """Tokens, where rows are recorded, are identical; metrics (gradient norms among them) and the weights of each step
    to 1e-5.

    `rounded`: gradients of float32 parts are sums over ranks. Metrics agree to 1e-4, and weights to a step of Adam.
    """
    assert metrics_agree(ours, theirs, 1e-4 if rounded else TOLERANCE)
    for line in read_metrics(theirs):
        step = line["step"]
        if (theirs / "rollouts").is_dir():
            rows = [recorded(run, step).ordered()["tokens"].values.tolist() for run in (ours, theirs)]
            assert rows[0] == rows[1]
        first, second = (weights(run / "checkpoints" / f"step-{step}") for run in (ours, theirs))
        assert first.keys() == second.keys() != set()
        for name, tensor in first.items():
            torch.testing.assert_close(tensor, second[name], atol=1e-3 if rounded else TOLERANCE, rtol=0)


def laid_out(sections: dict[str, Any], layout: str) -> dict[str, Any]:
    return merged(sections, {"runtime": "distributed", "workers": 2, "trainer": {"layout": LAYOUTS[layout]}})


@pytest.mark.soak
@pytest.mark.parametrize("layouts", [ON_RANKS, BY_ROWS], ids=["packed", "by rows"])
def test_families_train_on_two_ranks_as_in_one_process(tmp_path: Path, layouts: dict[str, str]) -> None:
    sections = merged(FLOWS["grpo"], {"trainer": {"steps": 1}})
    shops = {name: shop_of(tmp_path / name, name) for name in layouts}
    run_in_ranks([shops[name].tree("ranks", **laid_out(sections, layout)) for name, layout in layouts.items()], 2)
    for name, shop in shops.items():
        assert_same_run(shop.folder / "ranks", shop.run("alone", **sections), name == "qwen3_5_text")


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*case, marks=[pytest.mark.soak] * (case[1] == "expert")) for case in REFUSED],
)
def test_axis_that_cannot_divide_a_model_is_refused_in_a_line(tmp_path: Path, name: str, layout: str) -> None:
    shop = shop_of(tmp_path, name)
    with pytest.raises(UserError, match=REFUSED[name, layout]) as refused:
        train(parse_config(shop.tree("refused", **laid_out(FLOWS["grpo"], layout))))
    remedy = "write data alone" if name == "doge" else f"write {layout}=1"
    assert "\n" not in str(refused.value) and remedy in str(refused.value)


@pytest.mark.soak
@pytest.mark.parametrize("name", FAMILIES)
def test_each_flow_on_a_family_is_the_same_under_every_layout_and_runtime(tmp_path: Path, name: str) -> None:
    shop = shop_of(tmp_path, name)
    layouts = [layout for layout in LAYOUTS if (name, layout) not in REFUSED]
    runs = {f"{flow}-{layout}": laid_out(FLOWS[flow], layout) for flow in FLOWS for layout in layouts}
    run_in_ranks([shop.tree(each, **sections) for each, sections in runs.items()], 2)
    for flow, sections in FLOWS.items():
        alone = shop.run(flow, **sections)
        for layout in layouts:
            assert_same_run(shop.folder / f"{flow}-{layout}", alone, (name, layout) == ("qwen3_5_text", "tensor"))
        if flow in ("grpo", "dapo"):
            streamed = shop.run(f"{flow}-streaming", **sections, runtime="streaming")
            assert metrics_agree(streamed, alone, TOLERANCE)


@pytest.mark.soak
@pytest.mark.parametrize("layout", [None, "full"])
@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_killed_and_resumes_as_if_nothing_had_happened(tmp_path: Path, name: str, layout: str | None) -> None:
    shop = shop_of(tmp_path, name)
    sections = merged(FLOWS["grpo"], {"trainer": {"steps": 4}})
    config = shop.config_file("killed", **(laid_out(sections, layout) if layout else sections))
    killed, process = shop.folder / "killed", braid("train", config)
    wait_for_steps(killed, 2, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(read_metrics(killed)) < 4
    if layout:
        again = braid("train", "--resume", killed)
        _, output = again.communicate(timeout=180)
        assert again.returncode == 0, output
    else:
        with TrainingRun(run_config(killed), resume=killed) as run:
            run.train()
    assert_same_run(killed, shop.run("whole", **sections), (name, layout) == ("qwen3_5_text", "full"))


@pytest.mark.soak
@pytest.mark.parametrize("name", ON_VLLM)
def test_families_generate_with_vllm_what_the_embedded_engine_does(tmp_path: Path, name: str) -> None:
    shop, python = shop_of(tmp_path, name, **ON_VLLM[name]), vllm_python()
    for flow in ("grpo", "dapo"):
        sections = {**FLOWS[flow], "dtype": "float32"}
        rollout = {"engine": "vllm", "reproducible": True, "python": str(python) if python else None}
        served, alone = shop.run(f"{flow}-vllm", **merged(sections, {"rollout": rollout})), shop.run(flow, **sections)
        assert (
            recorded(served, 2).ordered()["tokens"].values.tolist()
            == recorded(alone, 2).ordered()["tokens"].values.tolist()
        )
        assert max(line["train/rollout_log_prob_gap"] for line in read_metrics(served)) < 1e-4
        # vLLM's numerics are not the trainer's: its run also has the metrics of a correction
        for ours, theirs in zip(metrics_without_times(served), metrics_without_times(alone), strict=True):
            assert {name: ours.get(name) for name in theirs} == pytest.approx(theirs, rel=1e-3, abs=1e-3)
