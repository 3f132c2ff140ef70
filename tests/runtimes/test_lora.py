"""Runs that train adapters: engines decode with the trained adapters, a run resumes exactly, and several ranks equal
one process.
"""

from __future__ import annotations

import sys
import threading
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from braidrl.engines.deployment_checks import check_deployment
from braidrl.errors import UserError
from braidrl.runtimes.prepare.deployment import deploy
from braidrl.runtimes.prepare.run_flow import build_flow
from braidrl.runtimes.run import TrainingRun
from braidrl.training.lora import ADAPTER
from braidrl.weights.file import ADAPTER as ADAPTER_WEIGHTS
from tests.engines.served import vllm_python
from tests.invariants.traces import assert_same, merged, run
from tests.runtimes.spmd.ranks import run_in_ranks
from tests.tiny import (
    MIXTURE,
    MODELS,
    ROOT,
    TOKENIZER,
    Workshop,
    metrics_without_times,
    recorded,
    sums,
    weights_of,
    write_jsonl,
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shop_of(tmp_path_factory.mktemp("mixture"))


def shop_of(folder: Path, **changes: Any) -> Workshop:
    torch.manual_seed(0)
    config = deepcopy(MIXTURE)
    config.update(changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    return Workshop(folder, folder / "model", write_jsonl(folder / "train.jsonl", sums(64)))


FLOW: dict[str, Any] = {"flow": "grpo", "algorithm": {"old": "recompute"}, "rollout": {"max_response_tokens": 3}}
TRAINER: dict[str, Any] = {
    "steps": 4,
    "prompts_per_step": 4,
    "rows_per_update": 8,
    "checkpoint_every": 2,
    "learning_rate": 1e-2,
    "lora": {"rank": 4, "alpha": 16},
}


def test_lora_rollouts_use_merged_weights_and_resume_exactly(workshop: Workshop) -> None:
    whole = workshop.run("whole", **FLOW, trainer=TRAINER)
    for step in range(1, TRAINER["steps"] + 1):
        rows = recorded(whole, step)
        gap = rows["rollout_log_probs"].values - rows["old_log_probs"].values
        assert float(gap.abs().max()) < 1e-5, "the engine's log-probs equal the trainer's"
    before = load_file(workshop.model / "model.safetensors")
    after = weights_of(whole)
    changed = {name for name, tensor in after.items() if not torch.allclose(tensor, before[name], atol=1e-3)}
    assert changed and all(name.endswith("proj.weight") for name in changed)
    checkpoint = whole / "checkpoints" / "step-4" / "actor"
    assert len(load_file(checkpoint / ADAPTER / ADAPTER_WEIGHTS)) == 2 * 14
    stopped = workshop.run("stopped", **FLOW, trainer={**TRAINER, "steps": 2})
    with TrainingRun(workshop.config("stopped", **FLOW, trainer=TRAINER), resume=stopped) as resumed:
        resumed.train()
    assert metrics_without_times(stopped)[-1]["actor/kl_old"] is not None
    assert [line["step"] for line in metrics_without_times(stopped)] == [1, 2, 3, 4]
    for name, tensor in weights_of(stopped).items():
        assert torch.equal(tensor, after[name]), name
    assert metrics_without_times(stopped) == metrics_without_times(whole)


@pytest.mark.soak
def test_policies_on_one_base_train_as_policies_with_engines_of_their_own(workshop: Workshop) -> None:
    trainer = {**TRAINER, "steps": 2, "checkpoint_every": 1}
    flow = {"flow": str(ROOT / "tests" / "runtimes" / "two_policies.yaml"), "trainer": trainer}
    shared = {"rollout": {"max_response_tokens": 4, "shared_base": True}}
    together = run(workshop, "together", **merged(flow, shared))
    assert_same(together, run(workshop, "apart", **merged(flow, {"rollout": {"max_response_tokens": 4}})))
    # Under streaming adapters alone reach the engine of all policies.
    streamed = run(workshop, "streamed", **merged(flow, shared), runtime="streaming")
    known = together[0].metrics.keys()
    assert_same([replace(s, metrics={k: s.metrics[k] for k in known}) for s in streamed], together)
    for changes, named in (
        ({"flow": "grpo"}, "play together"),
        ({"trainer": {"lora": None}}, "roles.actor.lora"),
        ({"rollout": {"engines": 1}}, "without rollout.engines"),
    ):
        config = workshop.config("refused", **merged(merged(flow, shared), changes))
        expected = build_flow(config)
        with pytest.raises(UserError, match=f"rollout.shared_base.*{named}"):
            check_deployment(deploy(config, expected), expected)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_one_vllm_that_dies_comes_back_with_the_adapters_of_each_policy(tmp_path: Path) -> None:
    config, python = deepcopy(MODELS["qwen3"]), vllm_python()
    config.update({"head_dim": 64})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    shop = Workshop(tmp_path, tmp_path / "model", write_jsonl(tmp_path / "train.jsonl", sums(64)))
    rollout = {"max_response_tokens": 4, "shared_base": True, "engine": "vllm", "reproducible": True}
    rollout |= {"python": str(python) if python else None}
    trainer = {**TRAINER, "steps": 12, "checkpoint_every": 12}
    killed: list[int] = []

    def kill_vllm() -> None:
        """End vLLM's process after the second step."""
        lines = tmp_path / "run" / "metrics.jsonl"
        while not lines.is_file() or len(lines.read_text().splitlines()) < 2:
            time.sleep(0.05)
        for process in psutil.Process().children():
            if "vllm" in " ".join(process.cmdline()):
                process.kill()
                killed.append(process.pid)

    killer = threading.Thread(target=kill_vllm, daemon=True)
    killer.start()
    run = shop.run("run", flow=str(ROOT / "tests" / "runtimes" / "two_policies.yaml"), rollout=rollout, trainer=trainer)
    killer.join(5)
    assert killed
    rows = recorded(run, 12)
    gaps = []
    for drawn, trained in (
        ("rollout_log_probs", "old_log_probs"),
        ("rival.rollout_log_probs", "rival.rival_log_probs"),
    ):
        gaps.append(float((rows[drawn].values - rows[trained].values).abs().max()))
    print(f"greatest gaps of actor and rival: {gaps} nats")
    assert max(gaps) < 1e-4
    actor, rival = (weights_of(run, role) for role in ("actor", "rival"))
    assert any(float((actor[name] - rival[name]).abs().max()) > 1e-3 for name in actor)


def test_adapters_of_a_checkpoint_start_another_run(workshop: Workshop) -> None:
    first = workshop.run("first", **FLOW, trainer={**TRAINER, "steps": 2})
    actor = first / "checkpoints" / "step-2" / "actor"
    start = {**TRAINER, "steps": 1, "lora": {"adapter": str(actor / ADAPTER)}}
    config = workshop.config("on", **FLOW, trainer=start)
    assert config.trainer.lora is not None and (config.trainer.lora.rank, config.trainer.lora.alpha) == (4, 16)
    assert config.trainer.lora.targets == tuple(sorted(config.trainer.lora.targets))
    merged_run = workshop.run("merged", **FLOW, model=str(actor), trainer={**TRAINER, "steps": 1})
    on = workshop.run("on", **FLOW, trainer=start)
    ours, theirs = recorded(on, 1), recorded(merged_run, 1)
    assert torch.equal(ours["tokens"].values, theirs["tokens"].values)
    torch.testing.assert_close(ours["rollout_log_probs"].values, theirs["rollout_log_probs"].values)
    for changed, named in (({"rank": 8}, "rank=8"), ({"adapter": str(workshop.folder)}, "adapter_config.json")):
        with pytest.raises(UserError, match=named):
            workshop.config("no", **FLOW, trainer={**start, "lora": {**start["lora"], **changed}})


@pytest.mark.soak
def test_sharded_adapter_training_equals_single_process(workshop: Workshop) -> None:
    trainer = {**TRAINER, "steps": 2}
    alone = workshop.run("alone", **FLOW, trainer=trainer)
    layouts: dict[str, Any] = {
        "shards": {"layout": {"shard": "full"}, "inference_layout": {"tensor": 2}},
        "matrices": {"layout": {"tensor": 2}},
    }
    more: dict[str, Any] = {"runtime": "distributed", "workers": 2}
    flow = {**FLOW, "rollout": {**FLOW["rollout"], "tensor": 2}}
    flows = {"shards": FLOW, "matrices": flow}
    run_in_ranks([workshop.tree(n, **flows[n], trainer={**trainer, **own}, **more) for n, own in layouts.items()], 2)
    for name in layouts:
        ranks = metrics_without_times(workshop.folder / name)
        for ours, theirs in zip(ranks, metrics_without_times(alone), strict=True):
            assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)
            assert ours["train/rollout_log_prob_gap"] < 1e-5


EXPERTS: dict[str, Any] = {
    "expert": {"runtime": "distributed", "workers": 2, "trainer": {"layout": {"expert": 2}}},
    "vllm": {"rollout": {"engine": "vllm", "reproducible": True}},
}


@pytest.mark.parametrize("way", ["merged", *(pytest.param(w, marks=pytest.mark.soak) for w in ("shared", *EXPERTS))])
def test_engines_draw_with_the_trained_adapters_of_experts(mixture: Workshop, way: str, tmp_path: Path) -> None:
    """Check merged copies, the trainer's own model, a layout of experts, and vLLM."""
    lora = {"rank": 4, "alpha": 16, "targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
    lora |= {"base_dtype": "nf4"} if way == "shared" else {}
    trainer = {**TRAINER, "steps": 3, "rows_per_update": 16, "lora": lora}
    sections = merged(merged(FLOW, {"trainer": trainer}), EXPERTS.get(way, {}))
    if way == "vllm":
        mixture, python = shop_of(tmp_path, head_dim=64), vllm_python()
        sections["rollout"] |= {"python": str(python) if python else None}
    if way == "expert":
        run_in_ranks([mixture.tree(way, **sections)], 2)
    run = mixture.folder / way if way == "expert" else mixture.run(way, **sections)
    rows = recorded(run, 3)
    gap = rows["rollout_log_probs"].values - rows["old_log_probs"].values
    assert float(gap.abs().max()) < (1e-4 if way == "vllm" else 1e-5)
    before, after = load_file(mixture.model / "model.safetensors"), weights_of(run)
    experts = [name for name in before if ".experts." in name]
    # Some experts are chosen for no token of three short steps.
    assert sum(not torch.equal(after[name], before[name]) for name in experts) > len(experts) / 2 > 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"roles": {"reference": {"lora": {}}}, "algorithm": {"kl_coef": 0.1}}, r"does not train reference; remove it"),
        (
            {"trainer": {"lora": {"targets": ["q_porj"]}}},
            r"'q_porj' .*Did you mean 'q_proj'",
        ),
    ],
)
def test_unsupported_adapter_settings_are_refused_before_loading(
    workshop: Workshop, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        workshop.run(**{**FLOW, **sections})
    assert "\n" not in str(caught.value)


def test_single_role_adapters_and_bfloat16_correction(workshop: Workshop) -> None:
    """Merging into bfloat16 weights rounds the adapters, so the engine's log-probs differ from the trainer's."""

    def corrected(**sections: Any) -> bool:
        flow = build_flow(workshop.config(flow="grpo", **sections))
        (update,) = [stage for stage in flow.stages if stage.type == "update"]
        return update.params.get("correction") is not None

    adapted = {"roles": {"actor": {"lora": {"rank": 2}}}}
    assert not corrected(**adapted) and not corrected(dtype="bfloat16") and corrected(**adapted, dtype="bfloat16")


def test_a_missing_peft_is_reported_with_the_install_command(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"lora .*peft; .*pip install 'braidrl\[lora\]'`"):
        workshop.run(**FLOW, trainer=TRAINER)
