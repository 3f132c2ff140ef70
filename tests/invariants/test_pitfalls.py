"""One test for each known mistake in the algorithms of other systems."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from statistics import fmean

import pytest
import torch

from braidrl.algorithms import registry
from braidrl.algorithms.advantages import group_normalized
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.token_advantages import gae
from braidrl.data.codec import decode, encode
from braidrl.data.rows import Objects, Rows
from braidrl.errors import UserError
from braidrl.flow import actor, loss
from braidrl.flow.flow import serial_chain
from braidrl.flow.recipes import load_flow
from braidrl.flow.stages import make_stage
from braidrl.observe.metrics import Sums, read_metrics
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import rollout_path
from braidrl.runtimes.generating.episodes import sampling_of
from braidrl.runtimes.restarts import train
from braidrl.training.backends import BackendSpec
from braidrl.training.compute.packed import pack
from braidrl.training.objective import Objective, denominators
from braidrl.training.roles.worker import RoleWorker
from braidrl.weights.in_place import EngineWeights
from braidrl.weights.publisher import ModelWeights
from tests.engines.tiny import make_model
from tests.recipes.tiny import make_config, write_data, write_decoder
from tests.training.roles.test_scalar import make_rows, random_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pitfalls")
    write_decoder(folder / "model")
    write_data(folder)
    return folder


def worker_of(folder: Path) -> RoleWorker:
    return RoleWorker(BackendSpec("actor", make_config(folder, "grpo", dtype="float64"), train=True))


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_mean_divides_by_global_count(aggregate: str, folder: Path) -> None:
    rows, worker = random_rows(6), worker_of(folder)
    objective = Objective.of("actor", {"loss": "sft", "aggregate": aggregate})
    log_probs = worker.forward("log_probs", rows)
    per_row = {
        "token-mean": -log_probs.row_sums() * len(rows) / int(rows["action_tokens"].sum()),
        "seq-mean-token-sum": -log_probs.row_sums(),
        "seq-mean-token-mean": -log_probs.row_means(),
    }[aggregate]
    parts = [[0], [1, 2, 3, 4], [5]]
    total = sum(worker.forward_backward(objective, rows.take(part), Sums())[objective.denominator] for part in parts)
    assert total / denominators(rows)[objective.denominator] == pytest.approx(float(per_row.mean()))
    if aggregate == "token-mean":
        local = [log_probs.take(torch.tensor(part)) for part in parts]
        assert fmean(-float(part.values.mean()) for part in local) != pytest.approx(float(per_row.mean()), rel=1e-3)


def test_row_mean_loss_uses_configured_aggregation() -> None:
    for name in ("gmpo", "gspo"):
        with pytest.raises(UserError, match=f"{name} .* seq-mean-token-mean, not token-mean"):
            actor.update(loss={"name": name}, aggregate="token-mean")


def test_remax_baseline_is_greedy_and_unknown_switch_is_refused(folder: Path) -> None:
    stage = load_flow("remax")["actor.generate.greedy"]
    assert sampling_of(stage, make_config(folder, "remax", rollout__temperature=1.5)).takes_likeliest
    with pytest.raises(UserError, match=r"parameter 'greddy'\..* mean 'greedy'"):
        make_stage("generate", "actor", {"greddy": True})


@pytest.mark.parametrize("name", list(registry.divergences))
def test_every_kl_variant_works_in_loss_and_reward(name: str, folder: Path) -> None:
    rows, worker = random_rows(3), worker_of(folder)
    log_probs = worker.forward("log_probs", rows)
    rows = rows.with_columns(
        {
            "ref_log_probs": log_probs.with_values(log_probs.values - 0.3),
            "rollout_log_probs": log_probs,
            "advantage": torch.ones(3),
            "reward": torch.ones(3),
        }
    )
    objective = Objective.of("actor", {"loss": "reinforce", "kl": {"name": name, "coef": 0.1}})
    worker.forward_backward(objective, rows, Sums())
    norm = worker.optim_step({"tokens": denominators(rows)["tokens"]}, 1)
    assert norm is not None and norm > 0
    penalty = registry.shapes["kl_penalty"].function
    shaped = penalty(rows["reward"], log_probs, rows["ref_log_probs"], coef=0.1, estimator=name)
    assert torch.isfinite(shaped.values).all() and not torch.equal(shaped.values, torch.zeros_like(shaped.values))


def test_a_join_sees_every_one_of_its_inputs() -> None:
    flow = load_flow("ppo")
    inputs = {column.name: column.writer for column in flow.inputs["advantage.gae"]}
    assert inputs["values"] == "critic.values" and inputs["token_rewards"] == "shape.kl_penalty"
    chain = [stage.name for stage in serial_chain(flow)]
    assert max(chain.index(writer) for writer in inputs.values()) < chain.index("advantage.gae")


def test_group_statistics_follow_the_groups_number_and_not_the_position() -> None:
    group = torch.tensor([7, 3, 7, 3, 3])
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    result = group_normalized(reward, group)
    assert torch.allclose(result[group == 7], group_normalized(reward[group == 7], group[group == 7]))
    assert float(result[group == 3].sum()) == pytest.approx(0.0, abs=1e-6)


def test_a_column_that_nobody_has_heard_of_travels() -> None:
    columns = {
        "group": torch.tensor([1, 2]),
        "odd": Ragged.from_rows([[1.5], []], torch.float32),
        "note": Objects(({"a": 1}, None)),
    }
    there = decode(encode(Rows(columns)))
    assert set(there) == set(columns)
    assert there["odd"].tolist() == [[1.5], []] and there["note"].values == ({"a": 1}, None)


def test_group_numbers_never_restart_and_filtered_batches_are_full(folder: Path) -> None:
    algorithm = {"overlong_cache": 0}
    run = train(make_config(folder, "dapo", algorithm=algorithm, trainer__steps=3, output=str(folder / "runs")))
    seen: set[tuple[int, int, int]] = set()
    for line in read_metrics(run):
        rows = read_rollouts(rollout_path(run, line["step"]))
        assert len(rows) == 16, "four groups of four"
        assert not seen & set(rows.uids())
        seen |= set(rows.uids())
        correct = rows["correct"].reshape(4, 4)
        assert bool(((correct.min(1).values == 0) & (correct.max(1).values == 1)).all())
        dropped = {key.rpartition("/")[2]: value for key, value in line.items() if key.startswith("groups/dropped/")}
        dropped.pop("surplus", None)  # Behind the batch's last group.
        assert line["rows/generated"] == 16 + 4 * sum(dropped.values())


def test_reward_is_at_end_of_row_not_of_each_sequence() -> None:
    rows = make_rows([[[2, 3, 4, 5], [6, 7, 8]]])
    values = Ragged.from_lengths(torch.zeros(3), rows["action_tokens"])
    advantages, _ = gae(values, torch.tensor([1.0]), gamma=0.5, lam=1.0)
    assert advantages.tolist() == [[0.25, 0.5, 1.0]], "one reward, discounted over the row's action tokens"


def test_nothing_is_padded_and_every_token_is_there_once() -> None:
    rows = make_rows([[[2, 3, 4], [5, 6, 7, 8]], [[9, 10, 11]]])
    packed = pack(rows, torch.device("cpu"))
    assert packed.input_ids.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
    assert packed.targets.tolist() == [4, 7, 8, 11] and packed.predictors.tolist() == [1, 4, 5, 8]


def test_every_action_token_of_every_micro_batch_has_its_gradient(folder: Path) -> None:
    rows, worker = random_rows(5), worker_of(folder)
    objective = Objective.of("actor", {"loss": loss.reinforce()})
    norms = []
    for weight in (torch.ones(5), torch.eye(5)[4]):
        given = rows.with_columns({"advantage": weight.double()})
        for part in ([0, 1], [2, 3, 4]):
            worker.forward_backward(objective, given.take(part), Sums())
        gradients = [gradient.clone() for gradient in worker.optimizer.sums["tokens"] if gradient is not None]  # type: ignore[union-attr]
        worker.optimizer.sums.clear()  # type: ignore[union-attr]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())
    assert norms[1] > 0, "the last row of the last part counts"
    assert norms[0] != pytest.approx(norms[1])


def test_tied_embeddings_reach_an_engine_with_separate_weights() -> None:
    model = make_model("qwen2-tied")
    engine = deepcopy(model).double()
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(0.5)
    EngineWeights(engine).refresh(ModelWeights(model))
    assert torch.equal(engine.get_output_embeddings().weight, model.get_output_embeddings().weight.double())
    assert engine.get_output_embeddings().weight is engine.get_input_embeddings().weight
