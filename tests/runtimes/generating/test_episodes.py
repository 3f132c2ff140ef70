"""Flows with environments: any recipe runs with episodes, episodes are trained on, and failures appear in the
metrics.
"""

from __future__ import annotations

import pytest
import torch

from braidrl.config import Config, parse_config
from braidrl.data.rows import FinishReason
from braidrl.errors import UserError
from braidrl.flow import Flow, actor, advantage, loss
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.prepare.run_flow import build_flow, evaluation_flow
from tests.runtimes.turns import PLAYED
from tests.tiny import Workshop, recorded, settings

FAILING = {"name": PLAYED, "params": {"fails": 2}}


def config_of(flow: str, **sections: object) -> Config:
    return parse_config(settings("runs", "model", "data.jsonl", **{"flow": flow, **sections}))  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ["grpo", "dapo", "remax", "rloo"])
def test_a_recipe_is_played_where_the_configuration_names_an_environment(recipe: str) -> None:
    plain = build_flow(config_of(recipe))
    played = build_flow(config_of(recipe, rollout={"environment": PLAYED}))
    assert any(stage.type == "verify" for stage in plain.stages)
    assert not any(stage.type == "verify" for stage in played.stages)
    generating = [stage for stage in played.stages if stage.type == "generate"]
    assert generating and all(stage.params["environment"] == PLAYED for stage in generating)
    assert len(generating) == sum(stage.type == "generate" for stage in plain.stages)


def test_a_stages_own_environment_wins() -> None:
    own = f"{__file__}:Nothing"
    flow = build_flow(config_of(f"{__file__}:own_environment", rollout={"environment": PLAYED}))
    assert flow["actor.generate"].params["environment"] == own


class Nothing:
    """An environment defined only by its methods."""

    def reset(self, example: object) -> None: ...

    def step(self, text: str) -> None: ...


def own_environment() -> Flow:
    generate = actor.generate(environment=f"{__file__}:Nothing")
    return Flow("own", [generate, advantage.group_normalized(), actor.update(loss=loss.clip())])


def test_evaluation_runs_episodes_with_the_environment() -> None:
    config = config_of("grpo", rollout={"environment": PLAYED})
    (stage,) = evaluation_flow(config, build_flow(config)).stages
    assert stage.params["environment"] == PLAYED and stage.params["purpose"] == "evaluation"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Game", "cannot import 'nowhere'"),
        (f"{__file__}:config_off", "'config_off'. Did you mean 'config_of'"),
        ("tests.tiny:Workshop", r"environment: .*lacks reset and step"),
    ],
)
def test_an_invalid_environment_is_refused_before_a_model_loads(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_flow(config_of("grpo", rollout={"environment": name}))


def test_run_trains_on_episodes_and_counts_failures(workshop: Workshop) -> None:
    run = workshop.run(
        "played",
        algorithm={"kl_coef": 0.0},
        rollout={"max_response_tokens": 4, "environment": FAILING},
        trainer={"rows_per_update": 8},
    )
    lines = read_metrics(run)
    assert [line["environment/failures/ValueError"] for line in lines] == [2, 2]
    assert all(2 < line["environment/turns"] < 3 for line in lines)
    assert [line["response/failed_fraction"] for line in lines] == [1 / 8, 1 / 8]
    for step in (1, 2):
        rows = recorded(run, step)
        failed = rows["finish_reason"] == FinishReason.ERROR
        assert lines[step - 1]["tokens/trained"] == int(rows["length"][~failed].sum()), (
            "failed trajectories are not trained on"
        )
        assert [uid[1:] for uid, f in zip(rows.uids(), failed.tolist(), strict=True) if f] == [
            (4 * step - 4, 1),
            (4 * step - 2, 1),
        ]
        assert rows["sequence_lengths"].lengths.tolist() == [1 if f else 2 for f in failed.tolist()]
        gap = (rows["old_log_probs"].values - rows["rollout_log_probs"].values).abs().max()
        assert gap < 1e-5
        assert torch.equal(rows["score"], rows["reward"])
        compared = [rows["advantage"][(rows["group"] == group) & ~failed].sum() for group in rows["group"].unique()]
        assert torch.stack(compared).abs().max() < 1e-5, "trajectories are not compared with failed ones"
        assert not rows["advantage"][failed].any() and rows["advantage"].any()


def test_rows_longer_than_micro_batch_are_refused_before_loading(workshop: Workshop) -> None:
    rollout = {"environment": PLAYED, "max_sequence_tokens": 300}
    with pytest.raises(UserError, match=r"may have 300 tokens.* write trainer.max_tokens_per_device=300"):
        workshop.run("long", rollout=rollout, trainer={"max_tokens_per_device": 200})
