"""Invariant 1 for ranks that generate in a separate layout: the result is that of one process for every grouping."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.observe.trace import read_trace
from braidrl.runtimes.restarts import train
from tests.invariants.traces import EVERY_STEP, assert_same, merged, trace
from tests.runtimes.spmd.ranks import run_in_ranks
from tests.runtimes.turns import PLAYED
from tests.tiny import MODELS, TOKENIZER, Workshop

FEW: dict[str, Any] = merged(
    EVERY_STEP,
    {"trainer": {"steps": 2, "prompts_per_step": 4, "rows_per_update": 8}, "rollout": {"samples_per_prompt": 2}},
)
GRPO: dict[str, Any] = merged(FEW, {"algorithm": {"old": "recompute"}})
PPO: dict[str, Any] = merged(GRPO, {"flow": "ppo", "algorithm": {"reward": "verify"}})
ON_2: dict[str, dict[str, Any]] = {
    "interval": {"trainer": {"layout": {"tensor": 2}}, "rollout": {"grouping": "interval"}},
    "pipeline": {"trainer": {"layout": {"pipeline": 2}}, "rollout": {"pipeline": 2}},
    "neighbour": {"trainer": {"layout": {"tensor": 2}}, "rollout": {"tensor": 2, "grouping": "neighbour"}},
    "gather": {"trainer": {"layout": {"shard": "full"}}, "rollout": {"tensor": 2, "grouping": "gather"}},
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model that splits over four tensor ranks and two pipeline ranks."""
    folder, config = tmp_path_factory.mktemp("wide"), deepcopy(MODELS["qwen3"])
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 4, 4
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.mark.soak
def test_generation_layout_equals_single_process(workshop: Workshop, wide: Path) -> None:
    workshop.model = wide
    ranks = {"runtime": "distributed", "workers": 2}
    trees = [workshop.tree(name, **merged(GRPO, own), **ranks) for name, own in ON_2.items()]
    # Episodes on the engine of both ranks, one of which has fewer of them.
    played = merged(
        GRPO, {"trainer": {"prompts_per_step": 3, "rows_per_update": 6}, "rollout": {"environment": PLAYED}}
    )
    trees.append(workshop.tree("played", **merged(played, ON_2["interval"]), **ranks))
    run_in_ranks(trees, 2)
    assert_same(trace(workshop.folder / "played"), trace(workshop.run("played-alone", **played)))
    alone = trace(workshop.run("alone", **GRPO))
    for name in ON_2:
        assert_same(trace(workshop.folder / name), alone)
    # Half of the model comes from the other rank where each rank had half, and nothing if the layout does not change.
    received = {name: read_metrics(workshop.folder / name)[0].get("weights/actor/received") for name in ON_2}
    assert received["pipeline"] is None
    assert all(received[name] > 0 for name in ("interval", "neighbour", "gather"))
    spans = [span for span in read_trace(workshop.folder / "interval") if span.stage == "weights"]
    assert {(span.role, span.iteration) for span in spans} == {("actor", 1), ("actor", 2)}


@pytest.mark.soak
@pytest.mark.parametrize("name", ["interval", pytest.param("pipeline", marks=pytest.mark.soak)])
def test_compiled_decoding_has_the_weights_of_each_version(workshop: Workshop, wide: Path, name: str) -> None:
    """Use float32, in which compiled kernels decode and place the projections of a layer side by side."""
    workshop.model = wide
    own = {**merged(GRPO, merged(ON_2[name], {"trainer": {"learning_rate": 0.05}})), "dtype": "float32"}
    run_in_ranks([workshop.tree("compiled", **own, runtime="distributed", workers=2)], 2)
    gaps = [line["train/rollout_log_prob_gap"] for line in read_metrics(workshop.folder / "compiled")]
    assert len(gaps) == 2 and max(gaps) < 1e-4


@pytest.mark.soak
def test_eight_ranks_train_generate_and_infer_in_three_layouts(workshop: Workshop, wide: Path) -> None:
    """Training (1, 4, 2) and (2, 2, 2), generation (1, 2), inference (1, 1): GRPO, and PPO with a critic."""
    workshop.model = wide
    ranks = {"runtime": "distributed", "workers": 8}
    layouts = {"142": {"tensor": 4, "data": 2}, "222": {"pipeline": 2, "tensor": 2, "data": 2}}
    trees = []
    for name, layout in layouts.items():
        own = {
            "trainer": {"layout": layout, "inference_layout": {"data": 8}},
            "rollout": {"tensor": 2, "grouping": "interval"},
        }
        trees += [
            workshop.tree(f"{flow} {name}", **merged(of, own), **ranks) for flow, of in (("grpo", GRPO), ("ppo", PPO))
        ]
    run_in_ranks(trees, 8)
    for flow, settings in (("grpo", GRPO), ("ppo", PPO)):
        alone = trace(workshop.run(f"{flow} alone", **settings))
        for name in layouts:
            assert_same(trace(workshop.folder / f"{flow} {name}"), alone)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"tensor": 2}, "workers": 3}, "rollout.tensor=2: 3 ranks generate"),
        ({"rollout": {"tensor": 8}, "workers": 8}, r"rollout.tensor=8 .*4 attention heads"),
        ({"rollout": {"pipeline": 3}}, r"rollout.pipeline=3 .*2 layers"),
        (
            {"rollout": {"tensor": 2, "grouping": "interval"}},
            "rollout.grouping=interval: training has pipeline=1, tensor=1",
        ),
        (
            {"trainer": {"layout": {"shard": "full"}}, "rollout": {"tensor": 2, "grouping": "neighbour"}},
            "rollout.grouping=neighbour .* write grouping=gather",
        ),
        ({"rollout": {"tensor": 2, "grouping": "gather"}}, "rollout.grouping=gather .* write shard=full"),
        (
            {"rollout": {"pipeline": 2, "engines": 1}},
            r"embedded engine .*without rollout.engines",
        ),
        (
            {"runtime": "eager", "rollout": {"pipeline": 2}},
            r"embedded engine .*write runtime=distributed",
        ),
        ({"rollout": {"grouping": "diagonal"}}, "rollout.grouping"),
    ],
)
def test_a_generation_layout_that_does_not_fit_is_one_line(
    workshop: Workshop, sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        train(parse_config(workshop.tree("refused", **{"runtime": "distributed", "workers": 2, **sections})))
    assert "\n" not in str(caught.value)
