"""A session's plain loop equals the runtime's own execution of the same stages, in one process and under hybrid."""

from __future__ import annotations

import gc
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import World
from braidrl.config import Config, parse_config
from braidrl.errors import UserError
from braidrl.flow import actor, advantage, loss, select
from braidrl.runtimes.session import Session
from braidrl.training.compute.packed import pack
from tests.cases import soak_but
from tests.invariants.traces import assert_same_weights, merged
from tests.runtimes.hybrid.warm import WarmCluster
from tests.tiny import ROOT, TOKENIZER, Workshop, load_module, weights_of

STEPS = 3
FAILING = """
from braidrl.runtimes.hybrid.protocols import register

class Own:
    def __init__(self, worker): ...

    @register(protocol="DP", reads=("tokens",), writes=("surprise",))
    def surprise(self, rows):
        return 1 / 0
"""


def settings(runtime: str = "eager") -> dict[str, Any]:
    return {
        "flow": "grpo",
        "runtime": runtime,
        "dtype": "float64",
        "placement": "standalone",
        "data": {"curriculum": "progress"},
        "trainer": {"steps": STEPS, "prompts_per_step": 4, "rows_per_update": 8, "learning_rate": 3e-3},
    }


def grpo_by_hand(config: Config, folder: Path, old: bool = True) -> list[dict[str, float]]:
    metrics = []
    with Session(config) as session:
        for _ in range(STEPS):
            rows = session.prompts()
            rows = session.actor.generate(rows)
            rows = session.reward.verify(rows)
            session.measure(rows)
            rows = session.reference.log_probs(rows)
            rows = session.actor.log_probs(rows) if old else rows
            rows = session.run(advantage.group_normalized(), rows)
            session.actor.update(
                rows,
                loss=loss.clip(low=0.2, high=0.2),
                kl={"name": "k3", "coef": 0.04},
                aggregate="seq-mean-token-mean",
            )
            metrics.append(session.metrics())
        session.save(folder)
    return metrics


@pytest.mark.parametrize(
    ("runtime", "old"),
    soak_but([("eager", True)], [("eager", True), ("hybrid", True), ("hybrid", False)]),
    ids=["eager", "hybrid", "old by itself"],
)
def test_a_loop_by_hand_trains_as_the_recipe_does(
    workshop: Workshop, warm_cluster: WarmCluster, runtime: str, old: bool
) -> None:
    recipe = workshop.run("recipe", **settings())
    metrics = grpo_by_hand(workshop.config("by-hand", **settings(runtime)), workshop.folder / "saved", old)
    assert_same_weights(load_file(workshop.folder / "saved" / "actor" / "model.safetensors"), weights_of(recipe))
    assert len(metrics) == STEPS and all(result["actor/grad_norm"] > 0 for result in metrics)


def two_objectives(config: Config, folder: Path) -> dict[str, float]:
    """Train once on two objectives of different rows, with settings of the step."""
    with Session(config) as session:
        rows = session.reward.verify(session.actor.generate(session.prompts()))
        rows = session.actor.log_probs(session.reference.log_probs(rows))
        rows = session.advantage.group_normalized(rows)
        clipped: dict[str, Any] = {"loss": loss.clip(low=0.2, high=0.2), "aggregate": "token-mean"}
        session.actor.forward_backward(rows, **clipped)
        session.actor.forward_backward(rows.take(list(range(8))), loss="sft", aggregate="seq-mean-token-sum")
        session.actor.optim_step(learning_rate=2e-3, betas=(0.5, 0.6), epsilon=1e-3, max_grad_norm=0.1)
        result = session.metrics()
        session.save(folder)
    return result


@pytest.mark.parametrize("runtime", ["eager", "hybrid"])
def test_objectives_that_are_accumulated_and_stepped_once_equal_their_sum(
    workshop: Workshop, warm_cluster: WarmCluster, runtime: str
) -> None:
    tree = settings(runtime)
    del tree["trainer"]["rows_per_update"]
    metrics = two_objectives(workshop.config("apart", **tree), workshop.folder / "apart")
    # The sum of both losses, by one backward pass.
    expected, norm = summed_by_hand(workshop.config("by-hand", **{**tree, "runtime": "eager"}))
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-7)
    assert_same_weights(load_file(workshop.folder / "apart" / "actor" / "model.safetensors"), expected)


def summed_by_hand(config: Config) -> tuple[dict[str, torch.Tensor], float]:
    """Return the weights and the gradient's norm of one AdamW step on the sum of both objectives."""
    with Session(config) as session:
        rows = session.reward.verify(session.actor.generate(session.prompts()))
        rows = session.actor.log_probs(session.reference.log_probs(rows))
        rows = session.advantage.group_normalized(rows).rows
        worker: Any = session.backend.executor.workers["actor"]
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(rows)):
            log_probs = worker.predict(pack(rows.take([row]), torch.device("cpu")))["log_probs"]
            # On the first step nothing is clipped; old log-probs are rounded to float32.
            ratio = (log_probs - rows["old_log_probs"][row]).exp()
            total = total - (ratio * rows["advantage"][row]).sum() / rows["action_tokens"].sum()
            total = total - log_probs.sum() / 8 if row < 8 else total
        named = dict(worker.model.named_parameters())
        gradients = torch.autograd.grad(total, list(named.values()))
    copies = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in named.items()}
    for parameter, gradient in zip(copies.values(), gradients, strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.AdamW(copies.values(), lr=2e-3, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.0)
    norm = torch.nn.utils.clip_grad_norm_(copies.values(), 0.1)
    optimizer.step()
    return {name: parameter.detach() for name, parameter in copies.items()}, float(norm)


def test_an_optimizer_step_without_accumulated_gradients_is_refused(workshop: Workshop) -> None:
    with (
        Session(workshop.config(**settings())) as session,
        pytest.raises(UserError, match=r"actor\.optim_step: nothing was accumulated; call session\.actor\.forward"),
    ):
        session.actor.optim_step()


def test_of_a_session_that_has_ended_no_weight_is_left(workshop: Workshop) -> None:
    def weights() -> int:
        gc.collect()
        return sum(type(kept) is torch.nn.Parameter for kept in gc.get_objects())

    before = weights()
    grpo_by_hand(workshop.config("by-hand", **settings()), workshop.folder / "saved")
    assert weights() == before


def test_select_leaves_out_the_groups_that_it_drops(workshop: Workshop) -> None:
    with Session(workshop.config(**settings())) as session:
        rows = session.reward.verify(session.actor.generate(session.prompts(8)))
        kept = session.index(session.run(select.informative_groups(), rows))
        everything = session.index(rows)
    _, place = everything["group"].unique(return_inverse=True)
    right = torch.zeros(int(place.max()) + 1).index_add(0, place, everything["correct"])
    informative = set(everything["group"].unique()[(right > 0) & (right < 4)].tolist())
    assert 0 < len(informative) < 8 and set(kept["group"].tolist()) == informative


def test_roles_that_are_not_there_or_not_trained_are_refused(workshop: Workshop) -> None:
    with Session(workshop.config(**settings())) as session:
        with pytest.raises(AttributeError, match="'critic' among actor, reference, reward"):
            _ = session.critic
        rows = session.actor.generate(session.prompts())
        with pytest.raises(UserError, match=r"reference .*no optimizer: .*grpo"):
            session.reference.update(rows, loss=loss.clip())


def test_a_verify_stage_gives_the_scores_that_its_call_names(workshop: Workshop) -> None:
    with Session(workshop.config(**settings("eager"))) as session:
        rows = session.actor.generate(session.prompts())
        index = session.index(session.reward.verify(rows, correct_score=5.0, wrong_score=-2.0))
    assert index["score"].tolist() == torch.where(index["correct"] > 0, 5.0, -2.0).tolist()


@pytest.mark.parametrize("runtime", ["eager", "hybrid"])
def test_session_rows_as_text_and_errors_name_missing_column(
    workshop: Workshop, warm_cluster: WarmCluster, runtime: str
) -> None:
    with Session(workshop.config(**settings(runtime))) as session:
        prompts = session.prompts()
        asked = session.texts(prompts)
        assert len(asked) == 16 and all(text.prompt.endswith("=") and text.response == "" for text in asked)
        rows = session.actor.generate(prompts)
        texts = session.texts(rows)
        assert [text.prompt for text in texts] == [text.prompt for text in asked]
        assert any(text.response for text in texts)
        none = rows.take([])
        for mistake, message in (
            (
                lambda: session.advantage.group_normalized(rows),
                "stage advantage.group_normalized reads 'reward'",
            ),
            (lambda: session.actor.log_probs(prompts), r"stage actor.log_probs .*'tokens', .*no earlier"),
            (
                lambda: session.actor.update(none, loss=loss.clip()),
                "actor.update got no rows",
            ),
            (
                lambda: session.reward.score(rows),
                r"reward.score: .*flow grpo; use actor",
            ),
            (lambda: session.actor.generat(rows), r"actor .*'generat'.* mean 'generate'"),
        ):
            with pytest.raises(UserError, match=message):
                mistake()
    with pytest.raises(UserError, match="the session is closed"):
        session.actor.log_probs(rows)


def test_an_exception_in_a_users_method_has_its_line(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FAILING)
    with Session(workshop.config(**settings())) as session:
        rows = session.actor.generate(session.prompts())
        with pytest.raises(UserError, match=r"^actor.surprise raised ZeroDivisionError: .*\(own.py:9\); mend"):
            session.run(actor.method(f"{tmp_path / 'own.py'}:Own.surprise"), rows)


def test_what_a_loop_cannot_do_is_refused(workshop: Workshop) -> None:
    with pytest.raises(UserError, match=r"runtime=streaming .*; write runtime=hybrid"):
        Session(workshop.config(**{**settings("streaming"), "placement": "colocate"}))
    with pytest.raises(UserError, match=r"suspends .*session resumes none"):
        Session(workshop.config(**merged(settings(), {"rollout": {"tokens_per_iteration": 4}})))
    with pytest.raises(UserError, match="start the script by `torchrun`"):
        Session(workshop.config(**{**settings("distributed"), "placement": "colocate"}))


EXAMPLE = load_module(ROOT / "examples" / "session.py")
LINES = {"ppo": 8, "remax": 8, "safe_rlhf": 13}
"""Stages of each loop: Safe-RLHF adds five to PPO's; ReMax replaces the critic's two and GAE by a second generation and
its reward.
"""


@pytest.mark.parametrize("algorithm", LINES)
def test_a_loop_has_a_line_for_each_stage_and_no_other(algorithm: str) -> None:
    _, _, body = inspect.getsource(getattr(EXAMPLE, algorithm)).partition("in session.batches():\n")
    lines = body.split("yield")[0].strip().splitlines()
    assert len(lines) == LINES[algorithm] and all(line.count("session.") == 1 for line in lines)


def of_recipe(algorithm: str, workshop: Workshop) -> dict[str, Any]:
    scorer = write_scorer(workshop.folder / "cost", workshop.model) if algorithm == "safe_rlhf" else None
    return {
        "flow": algorithm,
        "algorithm": {"reward": "verify", "kl_coef": 0.01, **({"lam": 0.95} if algorithm != "remax" else {})},
        "dtype": "float64",
        "trainer": {"steps": 2, "prompts_per_step": 4, "learning_rate": 3e-3},
        **({"roles": {"cost": {"model": str(scorer)}}} if scorer else {}),
    }


def write_scorer(folder: Path, decoder: Path) -> Path:
    """Write a random cost model with the decoder's tokenizer."""
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(decoder, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("ppo", {}),
        pytest.param("remax", {}, marks=pytest.mark.soak),
        pytest.param("safe_rlhf", {}, marks=pytest.mark.soak),
        ("safe_rlhf", {"runtime": "hybrid", "placement": "split"}),
    ],
)
def test_each_loop_of_the_example_trains_as_its_recipe_does(
    workshop: Workshop, warm_cluster: WarmCluster, algorithm: str, more: dict[str, Any]
) -> None:
    sections = of_recipe(algorithm, workshop)
    recipe = workshop.run("recipe", **sections)
    with Session(workshop.config("by-hand", **sections, **more)) as session:
        for rows in getattr(EXAMPLE, algorithm)(session):
            index = session.index(rows)
        session.save(workshop.folder / "saved")
    assert len(index) == 16
    assert_same_weights(load_file(workshop.folder / "saved" / "actor" / "model.safetensors"), weights_of(recipe))


def loop_on_a_rank(world: World, task: dict[str, Any]) -> int:
    """Run PPO by hand on each rank, and save."""
    with Session(parse_config(task["config"]), world) as session:
        rows = [session.index(rows) for rows in EXAMPLE.ppo(session)]
        session.save(Path(task["folder"]))
    return len(rows[-1])


@pytest.mark.soak
def test_ranks_run_the_loop_together(workshop: Workshop) -> None:
    sections = of_recipe("ppo", workshop)
    recipe = workshop.run("recipe", **sections)
    tree = workshop.tree("by-hand", **sections, runtime="distributed", workers=2)
    task = {"config": tree, "folder": str(workshop.folder / "saved"), "cuda": False}
    assert run_ranks("tests.runtimes.test_session:loop_on_a_rank", task, 2, 200.0) == 16
    assert_same_weights(load_file(workshop.folder / "saved" / "actor" / "model.safetensors"), weights_of(recipe))


def by_hand_beyond_the_flow(session: Session) -> Any:
    """Make an iteration with stages that the flow does not have, and return its rows."""
    rows = session.reward.verify(session.actor.generate(session.prompts()))
    rows = session.actor.log_probs(rows)
    rows = session.advantage.leave_one_out(rows)
    rows = session.shape.overlong_filter(rows)
    session.actor.update(rows, loss=loss.clip(low=0.3, high=0.3), aggregate="seq-mean-token-mean")
    return rows


def beyond_the_flow_on_a_rank(world: World, task: dict[str, Any]) -> int:
    with Session(parse_config(task["config"]), world) as session:
        rows = len(session.index(by_hand_beyond_the_flow(session)))
        session.save(Path(task["folder"]))
    return rows


@pytest.mark.soak
def test_ranks_run_stages_that_the_flow_does_not_have(workshop: Workshop) -> None:
    # With one update the flow needs no old log-probs.
    sections = {"flow": "grpo", "dtype": "float64", "trainer": {"prompts_per_step": 4, "learning_rate": 3e-3}}
    with Session(workshop.config("alone", **sections)) as session:
        assert "actor.log_probs" not in [stage.name for stage in session.prepared.flow.stages]
        by_hand_beyond_the_flow(session)
        session.save(workshop.folder / "alone")
    tree = workshop.tree("ranks", **sections, runtime="distributed", workers=3)
    task = {"config": tree, "folder": str(workshop.folder / "saved"), "cuda": False}
    assert run_ranks("tests.runtimes.test_session:beyond_the_flow_on_a_rank", task, 3, 200.0) == 16
    name = "actor/model.safetensors"
    assert_same_weights(load_file(workshop.folder / "saved" / name), load_file(workshop.folder / "alone" / name))


def in_other_tokens(scorer: Path, folder: Path) -> Path:
    """Return the same scorer for a tokenizer with token ids in reverse order."""
    model = AutoModelForSequenceClassification.from_pretrained(scorer)
    embedding = model.get_input_embeddings().weight
    embedding.data = embedding.data.flip(0)
    model.save_pretrained(folder)
    tokenizer = json.loads(TOKENIZER.backend_tokenizer.to_str())
    last = len(TOKENIZER) - 1
    tokenizer["model"]["vocab"] = {token: last - number for token, number in tokenizer["model"]["vocab"].items()}
    for token in tokenizer["added_tokens"]:
        token["id"] = last - token["id"]
    made = Tokenizer.from_str(json.dumps(tokenizer))
    own = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=TOKENIZER.eos_token, pad_token=TOKENIZER.pad_token)
    assert own.eos_token_id == last - TOKENIZER.eos_token_id
    own.save_pretrained(folder)
    return folder


def test_scoring_role_uses_its_own_tokenizer(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    same = write_scorer(workshop.folder / "same", workshop.model)
    other = in_other_tokens(same, workshop.folder / "other")
    sections = {**settings(), "flow": "ppo", "algorithm": {"reward": "score"}}

    def scored(model: Path, **more: Any) -> tuple[Any, torch.Tensor]:
        with Session(
            workshop.config("scored", **{**sections, "roles": {"reward": {"model": str(model)}}, **more})
        ) as session:
            rows = session.reward.score(session.actor.generate(session.prompts()))
            return rows, session.index(rows)["reward_score"]

    rows, expected = scored(same)
    _, result = scored(other)
    # A random model also samples padding, which is not text.
    texts = [number for number in range(len(rows)) if TOKENIZER.pad_token_id not in rows["tokens"][number].tolist()]
    ended = [rows["tokens"][number].tolist()[-1] == TOKENIZER.eos_token_id for number in texts]
    assert len(texts) > 4 and any(ended) and not all(ended)
    assert torch.allclose(result[texts], expected[texts], atol=1e-12) and len(set(expected[texts].tolist())) > 4
    assert torch.allclose(scored(other, runtime="hybrid")[1], result, atol=1e-12)


def test_role_with_compared_tokens_refuses_own_tokenizer(workshop: Workshop) -> None:
    other = in_other_tokens(write_scorer(workshop.folder / "same", workshop.model), workshop.folder / "other")
    with pytest.raises(UserError, match=r"roles.critic.model: .*another tokenizer .*scores .*not trained"):
        Session(workshop.config(flow="ppo", algorithm={"reward": "verify"}, roles={"critic": {"model": str(other)}}))


def test_the_example_runs(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    EXAMPLE.main(
        "ppo",
        f"model={workshop.model}",
        f"data.train={workshop.data}",
        "device=cpu",
        "threads=1",
        "trainer.steps=2",
        f"reward.verify={workshop.folder}/verifiers.py:starts_even",
        "rollout.max_response_tokens=8",
        "trainer.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "rollout.slots=16",
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1", "step 2"]
