"""A run that replays the engine's routes of a mixture of experts: the same under each runtime, with suspended rows."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.prepare.setup import prepare
from tests.invariants.traces import merged
from tests.runtimes.turns import PLAYED
from tests.tiny import SIZES, TOKENIZER, Workshop, metrics_agree, recorded, sums, write_jsonl
from tests.training.decoders.families import write_family

SECTIONS: dict[str, Any] = {
    "dtype": "float64",
    "algorithm": {"replay": "inference", "old": "recompute"},
    "rollout": {"max_response_tokens": 12},
    "trainer": {"steps": 2, "prompts_per_step": 3},
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("replay")
    mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.3}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**SIZES, **mixture}, head_dim=8, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(deepcopy(config)).save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    return Workshop(folder, folder / "model", write_jsonl(folder / "train.jsonl", sums(64)))


@pytest.fixture(scope="module")
def eager(workshop: Workshop) -> Path:
    return workshop.run("eager", **SECTIONS)


def test_a_replay_changes_nothing_where_both_choose_alike(workshop: Workshop, eager: Path) -> None:
    rows = recorded(eager, 1)
    assert rows["routed_experts"].lengths.tolist() == (rows["length"] - 1).tolist()
    assert max(line["train/rollout_log_prob_gap"] for line in read_metrics(eager)) < 1e-9
    free = workshop.run("free", **merged(SECTIONS, {"algorithm": {"replay": "none"}}))
    assert "routed_experts" not in recorded(free, 1) and metrics_agree(eager, free)


def test_updates_of_a_batch_keep_the_experts_of_its_recomputed_log_probs(workshop: Workshop) -> None:
    # The entropy bonus changes weights also where all rewards of a group are equal.
    algorithm = {"replay": "training", "entropy_coef": 0.3}
    trainer = {"steps": 1, "rows_per_update": 4, "learning_rate": 3e-2, "balance": {}}
    own = {"algorithm": algorithm, "trainer": trainer, "rollout": {"dtype": "float32"}}
    run = workshop.run("updates", **merged(SECTIONS, own))
    rows, (line,) = recorded(run, 1), read_metrics(run)
    assert rows["routed_experts"].lengths.tolist() == (rows["length"] - 1).tolist()
    changed = [line[f"actor/routes_changed/{layer}"] for layer in range(2)]
    assert all(0 < share < 0.9 for share in changed), "routers of later updates would choose others"


def test_an_engine_of_half_precision_is_followed_where_it_routes_otherwise(workshop: Workshop) -> None:
    gaps = {}
    for replay in ("none", "inference"):
        own = {"algorithm": {"replay": replay}, "dtype": "float32", "rollout": {"dtype": "bfloat16"}}
        balance = {"trainer": {"balance": {"routing_gap": replay == "inference"}}}
        run = workshop.run(f"half-{replay}", **merged(merged(SECTIONS, own), balance))
        changed = {name: value for name, value in read_metrics(run)[0].items() if "routes_changed" in name}
        assert len(changed) == (2 if replay == "inference" else 0)
        assert not changed or 0 < max(changed.values()) < 0.5
        gaps[replay] = read_metrics(run)[0]["train/rollout_log_prob_gap"]
        alone = read_metrics(run)[0].get("actor/routing_log_prob_gap")
        by_layer = [read_metrics(run)[0].get(f"actor/routing_log_prob_gap/{layer}", 0) for layer in range(2)]
    assert gaps["inference"] < gaps["none"] and alone is not None and 0 < alone < 2 * gaps["none"]
    assert 0 < max(by_layer) < 2 * gaps["none"], "the gap of one layer's routes"


def test_routes_of_every_turn_are_those_that_drew_its_tokens(workshop: Workshop) -> None:
    own = {"rollout": {"max_response_tokens": 4, "environment": PLAYED}, "trainer": {"steps": 1, "balance": {}}}
    run = workshop.run("turns", **merged(SECTIONS, own))
    rows, (line,) = recorded(run, 1), read_metrics(run)
    assert max(map(len, rows["sequence_lengths"].tolist())) > 1 and max(map(len, rows["turn_lengths"].tolist())) > 2
    assert line["train/rollout_log_prob_gap"] < 1e-9, "shifted routes would change log-probs"
    assert [line[f"actor/routes_changed/{layer}"] for layer in range(2)] == [0, 0]


def test_suspended_rows_train_on_their_routes_under_streaming(workshop: Workshop) -> None:
    own = {"rollout": {"tokens_per_iteration": 5}, "trainer": {"steps": 3, "max_staleness": 2, "surplus": "keep"}}
    run = workshop.run("streaming", **merged(SECTIONS, own), runtime="streaming")
    assert len(read_metrics(run)) == 3
    for step in range(1, 4):
        rows = recorded(run, step)
        assert rows["routed_experts"].lengths.tolist() == (rows["length"] - 1).tolist()


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"rollout": {"engine": "vllm"}}, "rollout.reproducible=true"),
        ({"rollout": {"engine": "vllm", "reproducible": True, "pipeline": 2}}, "rollout.pipeline=1"),
        ({"algorithm": {"replay": "training", "old": "rollout"}}, "write old=recompute"),
        ({"algorithm": {"replay": "none"}, "trainer": {"balance": {"routing_gap": True}}}, "algorithm.old=recompute"),
        ({"trainer": {"balance": {"bias": 0.1}}}, "no selection bias; write trainer.balance.auxiliary"),
        ({"trainer": {"balance": {"z": 0.1}, "lora": {"targets": ["q_proj"]}}}, "remove trainer.balance"),
    ],
)
def test_what_cannot_replay_is_refused_before_a_model_loads(
    workshop: Workshop, own: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        prepare(workshop.config("refused", **merged(SECTIONS, own)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("own", [{"algorithm": {"replay": "training"}}, {"trainer": {"balance": {"z": 0.1}}}])
def test_routers_that_cannot_be_followed_are_refused_before_a_model_loads(
    workshop: Workshop, tmp_path: Path, own: dict[str, Any]
) -> None:
    model = write_family(tmp_path / "model", "phimoe")
    off = {"algorithm": {"replay": "none"}}
    with pytest.raises(UserError, match=r"no routers of experts that Braid can follow; remove `replay` and"):
        prepare(workshop.config("refused", **merged(merged(SECTIONS, off), own), model=str(model)))
