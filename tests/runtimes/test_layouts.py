"""`trainer.layout` under the distributed runtime gives the result of one process for every axis, and wrong layouts are
refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.runtimes.restarts import train
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import run_config
from tests.invariants.traces import EVERY_STEP, assert_same, merged, trace
from tests.runtimes.spmd.ranks import run_in_ranks
from tests.tiny import Workshop

DIAMOND = Path(__file__).parent / "diamond.yaml"
STEPS = 2
# One group of two rows in each update, so that some ranks have no row to infer or to train on.
FEW: dict[str, Any] = merged(
    EVERY_STEP,
    {"trainer": {"steps": STEPS, "prompts_per_step": 2, "rows_per_update": 2}, "rollout": {"samples_per_prompt": 2}},
)
# Whitened, no advantage is 0; otherwise rounding would decide its sign, and with it whether a token counts as clipped.
PPO: dict[str, Any] = merged(FEW, {"flow": "ppo", "algorithm": {"reward": "verify", "kl_target": 0.5, "whiten": True}})
RECOMPUTED: dict[str, Any] = merged(PPO, {"algorithm": {"old": "recompute"}})
SELECTED: dict[str, Any] = merged(FEW, {"flow": "dapo", "trainer": {"over_sampling": 2}})
FLOW: dict[str, Any] = merged(FEW, {"flow": str(DIAMOND)})
REPLICA = {"actor": {"layout": {"tensor": 2, "shard": "optimizer"}}, "reference": {"layout": {"shard": "full"}}}


def test_run_with_layouts_equals_single_process_and_shares_checkpoint(workshop: Workshop) -> None:
    ranks = {"runtime": "distributed", "workers": 2}
    critic = {"trainer": {"layout": {"shard": "full"}}, "roles": {"critic": {"layout": {"tensor": 2}}}}
    full = workshop.tree("full", **merged(PPO, critic), **ranks)
    mixed = workshop.tree("mixed", **FLOW, roles=REPLICA, **ranks)
    staged = workshop.tree("staged", **merged(PPO, {"trainer": {"layout": {"pipeline": 2}}}), **ranks)
    run_in_ranks([full, mixed, staged], 2)
    alone = trace(workshop.run("alone", **PPO))
    assert_same(trace(workshop.folder / "full"), alone)
    assert_same(trace(workshop.folder / "staged"), alone)
    assert_same(trace(workshop.folder / "mixed"), trace(workshop.run("alone-mixed", **FLOW)))
    assert (workshop.folder / "full/checkpoints/step-1/critic/optimizer.safetensors").is_file()

    resumed = workshop.folder / "resumed"
    shutil.copytree(workshop.folder / "full", resumed)
    (resumed / "config.yaml").write_text(yaml.safe_dump(workshop.tree("resumed", **PPO)))
    (resumed / "checkpoints" / "latest").write_text("step-1\n")
    with TrainingRun(run_config(resumed), resume=resumed) as run:
        run.train()
    assert_same(trace(resumed), alone)


@pytest.mark.soak
def test_inference_layouts_and_engines_read_sharded_weights(workshop: Workshop) -> None:
    """The inference copy always has the current weights: stale ones would show in values and log-probs of the second
    step.
    """
    ranks = {"runtime": "distributed", "workers": 2}
    copies = {
        "trainer": {"layout": {"shard": "full"}, "inference_layout": {"tensor": 2}},
        "roles": {"critic": {"layout": {"pipeline": 2}, "inference_layout": {"data": 2}}},
    }
    # Three layouts of one role: it trains in two pipeline stages, and infers with shards; its engine's process has all
    # of it.
    engines = {"engines": 1}
    served = {"rollout": engines, "trainer": {"layout": {"pipeline": 2}, "inference_layout": {"shard": "full"}}}
    # In one process each: a process trains, infers and decodes with slices of others beside its own.
    pooled = merged(copies, {"rollout": {"tensor": 2}})
    run_in_ranks(
        [
            workshop.tree("pooled", **merged(RECOMPUTED, pooled), **ranks),
            workshop.tree("served", **merged(RECOMPUTED, served), **ranks),
        ],
        2,
    )
    alone = trace(workshop.run("alone", **RECOMPUTED))
    assert_same(trace(workshop.folder / "served"), alone)
    assert_same(trace(workshop.folder / "pooled"), alone)


@pytest.mark.soak  # `hybrid/test_layouts.py` has the same with Ray.
def test_joint_decoding_selects_the_rows_of_a_single_process(workshop: Workshop) -> None:
    ranks = {"runtime": "distributed", "workers": 2}
    run_in_ranks([workshop.tree("selected", **merged(SELECTED, {"rollout": {"tensor": 2}}), **ranks)], 2)
    assert_same(trace(workshop.folder / "selected"), trace(workshop.run("alone", **SELECTED)))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"trainer": {"inference_layout": {"tensor": 2}}},
            "trainer.inference_layout: no stage of grpo",
        ),
        (
            {"algorithm": {"old": "recompute"}, "trainer": {"inference_layout": {"tensor": 3}}},
            r"trainer.inference_layout: .*4 attention heads, .*tensor=3",
        ),
        (
            {
                "workers": 4,
                "algorithm": {"old": "recompute"},
                "roles": {"actor": {"inference_layout": {"tensor": 4}}},
            },
            r"roles.actor.inference_layout: .*2 key/value heads, .*tensor=4",
        ),
        (
            {"algorithm": {"kl_coef": 0.1}, "roles": {"reference": {"inference_layout": {"tensor": 2}}}},
            r"roles.reference.inference_layout: .*; write roles.reference.layout",
        ),
        (
            {"roles": {"actor": {"inference_layout": {"tensor": 2}}}},
            r"roles.actor.inference_layout: .*infers with actor; remove",
        ),
        ({"workers": 3, "rollout": {"tensor": 2}}, "rollout.tensor=2: 3 ranks generate"),
        (
            {"rollout": {"tensor": 2, "environment": {"name": "gem:rg:basic_arithmetic", "at_once": 1}}},
            r"rollout.environment.at_once=1 .*2 ranks .*; write 2",
        ),
        ({"runtime": "eager", "rollout": {"tensor": 2}}, r"rollout.tensor=2 .*embedded engine"),
        (
            {"runtime": "eager", "algorithm": {"old": "recompute"}, "trainer": {"inference_layout": {"shard": "full"}}},
            r"trainer.inference_layout .*runtime=distributed, .*; remove it",
        ),
        ({"trainer": {"layout": {"data": 3}}}, r"trainer.layout: .*3 devices .*2"),
        ({"roles": {"actor": {"layout": {"data": 4}}}}, r"roles.actor.layout: .*4 devices .*2"),
        ({"trainer": {"layout": {"sequence": 2}, "share_prompts": True}}, "sequence=1, or trainer.share_prompts=false"),
        ({"workers": 4, "trainer": {"layout": {"tensor": 4}}}, "2 key/value heads, which tensor=4"),
        (
            {"runtime": "eager", "trainer": {"layout": {"shard": "full"}}},
            r"trainer.layout .*runtime=distributed, .*; remove it",
        ),
        (
            {"runtime": "hybrid", "placement": [["actor"], ["reference"]], "trainer": {"layout": {"data": 4}}},
            r"trainer.layout: .*4 devices .*2",
        ),
        ({"trainer": {"layout": {"shard": "zero"}}}, "trainer.layout.shard"),
        (
            {"workers": 3, "trainer": {"layout": {"pipeline": 3}}},
            r"trainer.layout: .*2 layers, .*pipeline=3",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_one_line(workshop: Workshop, sections: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        train(parse_config(workshop.tree("refused", **{"runtime": "distributed", "workers": 2, **sections})))
    assert "\n" not in str(caught.value)
