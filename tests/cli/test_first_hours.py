"""A new user's first hours: loops by hand, evaluation and export of reward models, migration, messages."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from safetensors.torch import load_file

from braidrl.cli import commands as cli
from braidrl.config import parse_config
from braidrl.flow import loss
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.session import Session
from tests.invariants.traces import assert_same_weights
from tests.tiny import Workshop, sums, weights_of, write_jsonl

TRAINER = {"steps": 2, "prompts_per_step": 4, "rows_per_update": 8, "learning_rate": 3e-3}


@pytest.mark.parametrize(
    "trainer", [TRAINER, {**TRAINER, "rows_per_update": 16, "epochs": 2}], ids=["updates", "epochs"]
)
def test_the_loop_of_the_page_trains_as_the_recipe_with_several_updates(
    workshop: Workshop, trainer: dict[str, Any]
) -> None:
    sections: dict[str, Any] = {"dtype": "float64", "algorithm": {"kl_coef": 0.0}, "trainer": trainer}
    recipe = workshop.run("recipe", **sections)
    with Session(workshop.config("by-hand", **sections)) as session:
        for rows in session.batches():
            rows = session.actor.generate(rows)
            rows = session.reward.verify(rows)
            rows = session.advantage.group_normalized(rows)
            session.actor.update(rows, loss=loss.clip(), aggregate="seq-mean-token-mean")
            assert session.metrics()["actor/grad_norm"] > 0
        session.save(workshop.folder / "saved")
    assert_same_weights(load_file(workshop.folder / "saved" / "actor" / "model.safetensors"), weights_of(recipe))


def pairs(workshop: Workshop) -> str:
    records = [{**record, "chosen": record["response"], "rejected": "0" + record["response"]} for record in sums(8)]
    return str(write_jsonl(workshop.folder / "pairs.jsonl", records))


def test_a_reward_model_is_trained_evaluated_and_exported_without_further_settings(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def braid(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["braid", *arguments])
        with contextlib.suppress(SystemExit):
            cli.main()
        return capsys.readouterr().out

    data, output = pairs(workshop), f"output={workshop.folder}"
    common = [f"data.eval.held={data}", output, "device=cpu", "threads=1"]
    sizes = [
        "trainer={steps: 2, prompts_per_step: 4, learning_rate: 1e-2}",
        "evaluation={every: 2, before_first_step: false}",
    ]
    braid("train", "flow=reward_model", f"model={workshop.model}", f"data.train={data}", "name=rm", *common, *sizes)
    run = workshop.folder / "rm"
    trained = read_metrics(run)[-1]["eval/held/pair_accuracy"]
    assert "pair_accuracy" in (run / "report.html").read_text()
    assert "ForSequenceClassification" in braid("export", str(run), str(workshop.folder / "model"))
    # The configuration of a policy's run, as of one that was to be scored by this model, has another flow.
    (policies := workshop.folder / "policies.yaml").write_text("flow: grpo\nalgorithm: {kl_coef: 0.1}\n")
    for given in ([], [str(policies)]):
        answer = braid("eval", *given, f"model={workshop.folder / 'model'}", *common)
        lines = dict(line.split("\t") for line in answer.splitlines())
        assert lines.keys() == {"eval/held/pair_accuracy", "eval/held/margin"}
        assert float(lines["eval/held/pair_accuracy"]) == pytest.approx(trained, abs=1e-4)


@pytest.mark.parametrize(("flow", "samples"), [("dpo", 2), ("sft", 1), ("grpo", 8)])
def test_flows_of_given_responses_have_their_own_default_of_samples(
    workshop: Workshop, flow: str, samples: int
) -> None:
    tree = workshop.tree(flow=flow, data={"train": pairs(workshop)}, trainer={"steps": 1})
    del tree["rollout"]["samples_per_prompt"]
    with TrainingRun(parse_config(tree)) as run:
        run.train()
    assert run.config.rollout.samples_per_prompt == samples
    assert read_metrics(run.folder)[-1]["step"] == 1
