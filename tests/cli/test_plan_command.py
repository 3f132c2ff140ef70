"""`braid plan` writes configurations that run unchanged and match the dry run; mistakes end in one line."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import Qwen2Config

from braidrl.cli.commands import app
from braidrl.cli.dry_run import dry_run
from braidrl.cli.plan_command import PlanOptions, best_plans, calibrated, plan, problem_of
from braidrl.config import load_config
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.plan.calibration import least_squares, nonnegative
from braidrl.plan.configured import overlay_of, predicted
from braidrl.plan.plan_report import plans_table, reason, roles_table, seconds_text, spans_of
from braidrl.plan.rates import read_rates
from braidrl.runtimes.memory.budget import moving, peak
from braidrl.runtimes.prepare.deployment import deploy
from braidrl.runtimes.run import TrainingRun
from tests.tiny import MIXTURE, ROOT, TOKENIZER, Workshop, braid

PPO: dict[str, Any] = {
    "flow": "ppo",
    "algorithm": {"kl_coef": 0.1, "reward": "verify"},
    "trainer": {"max_tokens_per_device": 64},
}
QUIET = Console(file=StringIO(), width=160)


def written(workshop: Workshop, name: str, best: Any, problem: Any) -> Path:
    overlay = workshop.folder / f"{name}-overlay.yaml"
    overlay.write_text(yaml.safe_dump(overlay_of(best, problem)))
    return overlay


def test_every_plan_is_a_configuration_with_the_plans_settings(workshop: Workshop) -> None:
    config = workshop.config(**PPO)
    problem = problem_of(config, PlanOptions("1x4xcpu", max_staleness=1))
    plans = best_plans(problem, PlanOptions("1x4xcpu", max_staleness=1))
    assert {one.runtime for one in plans} >= {"hybrid", "streaming"}
    for number, best in enumerate(plans):
        overlay = written(workshop, str(number), best, problem)
        settings = load_config(workshop.folder / "run.yaml", [str(overlay)])
        groups = dry_run(settings, QUIET)
        assert sum(group.devices for group, _ in groups) == sum(one.devices for one in best.sets)
        planned = sorted(one.memory for one in best.sets)
        counted = sorted(peak(footprints) for _, footprints in groups)
        assert planned == pytest.approx(counted, rel=0.1)
        assert predicted(problem_of(settings, PlanOptions("1x4xcpu"))).seconds == pytest.approx(best.seconds, rel=0.1)


QWEN = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
}
"""Width, inner width, layers, heads, key/value heads, vocabulary and tied embedding of Qwen2.5, as their configurations
state them.
"""


def qwen(folder: Path, size: str) -> Path:
    """Write a Qwen2.5's configuration without weights."""
    width, inner, layers, heads, key_values, vocabulary, tied = QWEN[size]
    Qwen2Config(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_values,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        architectures=["Qwen2ForCausalLM"],
        eos_token_id=TOKENIZER.eos_token_id,
    ).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("example", "size", "devices", "engine"),
    [
        ("gsm8k/config", "0.5B", "1x1xH100-80GB", "embedded"),
        slow("dapo_math/qwen2.5-0.5b", "0.5B", "1x1xH100-80GB", "embedded"),
        slow("dapo_math/qwen2.5-7b", "7B", "1x8xH100-80GB", "embedded"),
        slow("dapo_math/qwen2.5-7b", "7B", "1x8xH100-80GB", "vllm"),
        slow("dapo_math/qwen2.5-32b", "32B", "16x8xH100-80GB", "embedded"),
        slow("gsm8k/streaming", "0.5B", "1x8xH100-80GB", "embedded"),
        slow("gsm8k/streaming", "0.5B", "1x8xH100-80GB", "vllm"),
    ],
)
def test_planned_memory_of_examples_is_that_of_the_dry_run(
    tmp_path: Path, sums_file: Path, example: str, size: str, devices: str, engine: str
) -> None:
    """As they are configured, and as the best plans of each runtime configure them."""
    path, request = ROOT / "examples" / f"{example}.yaml", PlanOptions(devices)
    changes = [
        f"model={qwen(tmp_path, size)}",
        f"data.train={sums_file}",
        "data.eval={}",
        "reward.verify=gsm8k",
        "device=cuda",
        f"rollout.engine={engine}",
    ]
    config = load_config(path, changes)
    problem = problem_of(config, request)
    plans = [(config, predicted(problem))]
    for number, best in enumerate(best_plans(problem, request)[:3]):
        overlay = tmp_path / f"{number}.yaml"
        overlay.write_text(yaml.safe_dump(overlay_of(best, problem)))
        plans.append((load_config(path, [str(overlay), *changes]), best))
    for settings, best in plans:
        planned = sorted((one.devices, one.memory) for one in best.sets)
        groups = [(group.devices, footprints) for group, footprints in dry_run(settings, QUIET) if footprints]
        counted = sorted((n, peak(own, moving(deploy(settings, problem.flow), own)[0])) for n, own in groups)
        assert [n for n, _ in planned] == [n for n, _ in counted]
        assert [size for _, size in planned] == pytest.approx([size for _, size in counted], rel=0.1)
        assert predicted(problem_of(settings, request)).seconds == pytest.approx(best.seconds, rel=0.1)


@pytest.mark.parametrize(
    ("devices", "size"),
    [
        ("1x8xH100-80GB+1x8xA100-80GB", "0.5B"),
        slow("4x8xH100-80GB+2x8xA100-80GB", "7B"),
        slow("16x8xH100-80GB+8x8xA100-80GB", "32B"),
    ],
)
def test_plans_of_mixed_clusters_come_in_time_and_pass_their_dry_run(
    tmp_path: Path, sums_file: Path, devices: str, size: str
) -> None:
    """Rows are longer than the usual micro-batch, whose size each role's own setting replaces."""
    path, limit_s = ROOT / "examples" / "gsm8k" / "config.yaml", 2.0
    changes = [
        f"model={qwen(tmp_path, size)}",
        f"data.train={sums_file}",
        "data.eval={}",
        "reward.verify=gsm8k",
        "device=cuda",
        "rollout.max_response_tokens=20000",
    ]
    problem = problem_of(load_config(path, changes), PlanOptions(devices, lengths="4000:20000"))
    start = time.monotonic()
    plans = best_plans(problem, PlanOptions(devices, time_limit=limit_s, max_staleness=1))
    taken = time.monotonic() - start
    assert plans and taken < 4 * limit_s, f"the search took {taken:.1f} s in place of {limit_s:g} s"
    for number, best in enumerate(plans[:3]):
        overlay = tmp_path / f"{number}.yaml"
        overlay.write_text(yaml.safe_dump(overlay_of(best, problem)))
        dry_run(load_config(path, [*changes, str(overlay)]), QUIET)


def test_plans_differ_where_engines_differ(workshop: Workshop) -> None:
    rates = workshop.folder / "rates.yaml"
    rates.write_text("cpu: {decode: {step_s: 0.01}, vllm: {decode: {step_s: 0.0001}}}")
    seconds = {}
    for engine in ("embedded", "vllm"):
        request = PlanOptions("1x1xcpu", rates=rates)
        problem = problem_of(workshop.config(rollout={"engine": engine}), request)
        (first, *_) = best_plans(problem, request)
        seconds[engine] = first.costs["actor.generate"].seconds
        held = first.sets[0].roles["actor"].resident
        assert ("weights of the engine" in held) == (engine == "vllm")
    assert seconds["vllm"] < 0.5 * seconds["embedded"]


def test_the_report_fits_eighty_columns_and_says_what_was_varied(workshop: Workshop) -> None:
    shown, request = StringIO(), PlanOptions("1x4xcpu", max_staleness=1)
    plan(workshop.config(**PPO), request, None, None, Console(file=shown, width=80))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in shown.getvalue()
    assert all(any(line.startswith(word) for line in lines) for word in ("varied:", "kept:", "decided:"))


def test_plans_with_different_stages_are_compared(workshop: Workshop) -> None:
    request = PlanOptions("1x2xcpu", max_staleness=1)
    config = workshop.config(algorithm={"kl_coef": 0}, trainer={"rows_per_update": None})
    plans = best_plans(problem_of(config, request), request)
    few, many = min(plans, key=lambda one: len(one.costs)), max(plans, key=lambda one: len(one.costs))
    # Staleness adds a stage: recomputed log-probs.
    assert many.costs.keys() - few.costs.keys() == {"actor.log_probs"}
    assert reason(many, few) and reason(few, many)


def test_a_standalone_role_has_the_memory_of_its_plan(workshop: Workshop) -> None:
    problem = problem_of(workshop.config(algorithm={"kl_coef": 0}), PlanOptions("1x2xcpu", max_staleness=1))
    for best in best_plans(problem, PlanOptions("1x2xcpu", max_staleness=1)):
        (whole,), roles = plans_table(problem, [best]).columns[4].cells, list(roles_table(best).columns[2].cells)
        assert roles == [whole] if len(roles) == 1 else whole in roles


def test_the_plan_for_one_core_trains_as_it_is(workshop: Workshop) -> None:
    config = workshop.config(**PPO)
    overlay, page = workshop.folder / "overlay.yaml", workshop.folder / "plan.json"
    plans = plan(config, PlanOptions("1x1xcpu"), overlay, page, QUIET)
    assert plans[0].runtime == "eager" and "actor.generate" in page.read_text()
    with TrainingRun(load_config(workshop.folder / "run.yaml", [str(overlay), "trainer.steps=1"])) as run:
        run.train()
    assert len(read_metrics(run.folder)) == 1


@pytest.mark.parametrize(
    "runtime", ["streaming", *(pytest.param(runtime, marks=pytest.mark.soak) for runtime in ("distributed", "hybrid"))]
)
def test_plans_for_two_cores_and_more_train_as_they_are(workshop: Workshop, runtime: str) -> None:
    request = PlanOptions("1x3xcpu" if runtime == "streaming" else "1x2xcpu")
    problem = problem_of(workshop.config(**({} if runtime == "streaming" else PPO)), request)
    best = next(one for one in best_plans(problem, request) if one.runtime == runtime)
    overlay = written(workshop, runtime, best, problem)
    process = braid("train", workshop.folder / "run.yaml", overlay, "trainer.steps=1")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert f"runtime: {runtime}" in (workshop.folder / "run" / "config.yaml").read_text()


@pytest.mark.soak
def test_a_process_uses_the_memory_in_its_plan(tmp_path: Path) -> None:
    # In a separate process, because memory that this one has used would count.
    file = tmp_path / "memory.json"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "benchmarks.planning.memory", str(file)], cwd=root, check=True, timeout=600)
    # Memory that one part has freed may hold another one, or not: runs of one plan differ by a tenth.
    assert 0.95 < json.loads(file.read_text())["ratio"] < 1.2


def test_the_predicted_timeline_has_every_timed_stage(workshop: Workshop) -> None:
    problem = problem_of(workshop.config(**PPO), PlanOptions("1x4xcpu"))
    for best in best_plans(problem, PlanOptions("1x4xcpu")):
        assert {span.stage for span in spans_of(best)} >= {"actor.generate", "actor.update", "critic.update"}


def test_least_squares_recovers_nonnegative_costs_from_their_seconds() -> None:
    rows = [(1.0, 10.0, 3.0), (2.0, 10.0, 1.0), (4.0, 20.0, 7.0), (1.0, 40.0, 2.0), (3.0, 5.0, 9.0)]
    samples = [dict(zip("abc", row, strict=True)) for row in rows]
    best = least_squares(samples, [2 * a + 0.5 * b for a, b, _ in rows])
    assert best == pytest.approx({"a": 2, "b": 0.5, "c": 0}, abs=1e-9)
    assert min(least_squares(samples, [5.0, 1.0, 1.0, 4.0, 0.1]).values()) >= 0
    steps = [(10, 2.0), (30, 0.5), (50, 4.0), (20, 1.0), (90, 2.0)]
    samples = [{"a": 1.0, "b": float(rows), "c": taken} for rows, taken in steps]
    seconds, known = [1.0 + 0.02 * rows + 1.25 * taken for rows, taken in steps], [taken for _, taken in steps]
    assert least_squares(samples, seconds, known) == pytest.approx({"a": 1.0, "b": 0.02, "c": 0.25})


@given(st.data())
def test_least_squares_is_optimal_among_nonnegative_costs(data: st.DataObject) -> None:
    numbers = st.floats(-2, 2).map(lambda x: round(x, 3))
    a = np.array(data.draw(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=4, max_size=8)))
    b = np.array(data.draw(st.lists(numbers, min_size=len(a), max_size=len(a))))
    x = nonnegative(a, b)
    assert (x >= 0).all()
    # The best of all sets of non-zero numbers, each solved without bounds.
    others = [np.zeros(3)]
    for kept in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        one = np.zeros(3)
        one[list(kept)] = np.linalg.lstsq(a[:, kept], b, rcond=None)[0]
        others += [one] if (one >= 0).all() else []
    least = min(float(((a @ one - b) ** 2).sum()) for one in others)
    assert float(((a @ x - b) ** 2).sum()) <= least + 1e-6


@pytest.mark.soak
def test_a_calibrated_run_is_predicted_as_it_was(workshop: Workshop) -> None:
    run = workshop.run(trainer={"steps": 6})
    rates = workshop.folder / "rates.yaml"
    calibrated([run], "1x1xcpu", rates)
    settings = workshop.config("again")
    problem = problem_of(settings, PlanOptions("1x1xcpu", lengths=str(run), rates=rates))
    seconds = sorted(line["time/step"] for line in read_metrics(run))
    assert seconds[0] / 3 < predicted(problem).seconds < seconds[-1] * 3
    assert read_rates(rates)["cpu"].stages["verify"] > 0


ENVIRONMENT = {"rollout": {"environment": "gem:game:GuessTheNumber-v0-easy"}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "8x8xH10-80GB"], "'H10-80GB'. Did you mean 'H100-80GB'?"),
        (["--devices", "8x8x"], "'8x8x' is not NODESxDEVICESxKIND"),
        (["--devices", "0x8xA100-80GB"], "has no devices"),
        (["--devices", "none.yaml"], "there is no file none.yaml"),
        (["--seconds", "actor.generat=3"], "Did you mean 'actor.generate'?"),
        (["--seconds", "actor.generate=slow"], "is not STAGE=SECONDS"),
        (["--seconds", "actor.generate=nan"], "is not STAGE=SECONDS"),
        (["--lengths", "20:10"], "TOKENS or MEDIAN:LONGEST"),
        (["--lengths", "0:10"], "TOKENS or MEDIAN:LONGEST"),
        (["--rates", "none.yaml"], "braid plan --calibrate RUN --rates none.yaml"),
    ],
)
def test_user_errors_of_plan_have_one_line(workshop: Workshop, arguments: list[str], said: str) -> None:
    path = str(workshop.config_file())
    with pytest.raises(UserError) as caught:
        app(["plan", path, *arguments], standalone_mode=False)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "Input should be a valid dictionary"),
        ("cpu: {shre: 1}", "unknown key 'cpu.shre'. Known: behind, collective_s"),
    ],
)
def test_a_file_of_rates_that_is_none_is_refused_with_its_reason(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rates.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(said)):
        read_rates(path)


@pytest.mark.soak
def test_a_stage_without_a_price_asks_for_its_seconds(workshop: Workshop) -> None:
    config = workshop.config(**ENVIRONMENT)
    with pytest.raises(UserError, match=r"actor.generate plays in an environment.*--seconds actor.generate=2.5"):
        best_plans(problem_of(config, PlanOptions("1x1xcpu")), PlanOptions("1x1xcpu"))
    given = PlanOptions("1x1xcpu", seconds=["actor.generate=7"])
    assert best_plans(problem_of(config, given), given)[0].costs["actor.generate"].seconds == 7


def test_devices_may_come_from_a_file_with_kinds_of_its_own(workshop: Workshop) -> None:
    path = workshop.folder / "devices.yaml"
    kind = {
        "source": "ours",
        "peak": {"float32": 1e12},
        "memory": "1 GiB",
        "bandwidth": 1e11,
        "link": 1e10,
        "network": 1e9,
        "host": 1e9,
    }
    path.write_text(yaml.safe_dump({"kinds": {"ours": kind}, "groups": [{"kind": "ours", "nodes": 2, "devices": 2}]}))
    problem = problem_of(workshop.config(), PlanOptions(str(path)))
    assert (problem.cluster.size, str(problem.cluster)) == (4, "2x2xours")
    path.write_text(yaml.safe_dump({"groups": [{"kind": "ours", "node": 2}]}))
    with pytest.raises(UserError, match=r"unknown key 'groups\.0\.node'"):
        problem_of(workshop.config(), PlanOptions(str(path)))


@pytest.mark.parametrize(("seconds", "text"), [(0.0314, "0.0314"), (99.7, "100"), (207.4, "207"), (12345.6, "12,346")])
def test_seconds_of_hours_have_no_exponent(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


MIXTURES: dict[str, dict[str, Any]] = {
    "235b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "vocab_size": 151936,
    },
    "30b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
    },
    "dense-last": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "dense-between": {"decoder_sparse_step": 2},
    "dense-first": {"mlp_only_layers": [0], "output_router_logits": True},
}
"""Settings of mixtures: the sizes of Qwen3-235B-A22B and Qwen3-30B-A3B, and models of which some layers are dense."""


@pytest.mark.parametrize(
    ("size", "devices", "engine"),
    [
        ("dense-between", "1x4xH100-80GB", "embedded"),
        ("dense-first", "1x4xH100-80GB", "vllm"),
        ("dense-last", "1x4xA100-80GB", "embedded"),
        slow("30b", "2x4xH100-80GB", "vllm"),
        slow("dense-between", "2x8xH100-80GB", "embedded"),
        slow("235b", "8x8xH100-80GB", "vllm"),
        slow("235b", "64x8xH100-80GB", "vllm"),
    ],
)
def test_plans_of_a_mixture_on_many_gpus_pass_the_dry_run(
    tmp_path: Path, sums_file: Path, size: str, devices: str, engine: str
) -> None:
    model, overlay = tmp_path / "model", tmp_path / "overlay.yaml"
    mixture = deepcopy(MIXTURE)
    mixture.update(MIXTURES[size])
    mixture.save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    path = ROOT / "examples" / "gsm8k" / "config.yaml"
    changes = [
        f"model={model}",
        f"data.train={sums_file}",
        "data.eval={}",
        "data.max_prompt_tokens=128",
        "rollout.max_response_tokens=64",
        f"rollout.engine={engine}",
        "reward.verify=gsm8k",
        "device=cuda",
    ]
    request = PlanOptions(devices, lengths="16:64", time_limit=0.2)
    problem = problem_of(load_config(path, changes), request)
    best, *_ = best_plans(problem, request)
    overlay.write_text(yaml.safe_dump(overlay_of(best, problem)))
    out = StringIO()
    dry_run(load_config(path, [*changes, str(overlay)]), Console(file=out, width=400))
    assert re.search(r"parameters, [\d.]+[MB] active", out.getvalue())
