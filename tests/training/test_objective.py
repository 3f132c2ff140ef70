"""Each term of an update is divided by its own global count, however rows are split into micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import aggregations
from braidrl.data.rows import Rows
from braidrl.observe.metrics import Sums
from braidrl.training.backends import BackendSpec
from braidrl.training.compute.packed import pack
from braidrl.training.objective import Objective, column_values, denominators
from braidrl.training.roles.worker import RoleWorker
from tests.recipes.tiny import make_config, write_decoder
from tests.training.roles.test_scalar import random_rows

PARAMS: dict[str, Any] = {"loss": "reinforce", "aggregate": "token-mean", "old": "self"}


@aggregations.register("per-row-tokens", denominator="rows")
def per_row_tokens(offsets: torch.Tensor) -> torch.Tensor:
    """Return 1 for every token, over rows."""
    return torch.ones(int(offsets[-1]), dtype=torch.float64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objective")
    write_decoder(folder / "model")
    return folder


def make_worker(folder: Path, max_tokens: int = 4096) -> RoleWorker:
    changes = {"trainer__max_tokens_per_device": max_tokens, "trainer__max_grad_norm": None}
    return RoleWorker(BackendSpec("actor", make_config(folder, "grpo", dtype="float64", **changes), train=True))


def make_rows(seed: int = 0) -> Rows:
    """Return six rows with advantages; three are correct, two are masked out, and each has a text of 0 to 5 tokens."""
    texts = [[3, 4, 5], [], [6], [7, 8, 9, 10, 11], [2, 3], [5, 4, 3, 2]]
    joined = Ragged.from_rows(texts, torch.int64)
    return random_rows(6, seed).with_columns(
        {
            "advantage": torch.linspace(-1, 1, 6, dtype=torch.float64),
            "correct": torch.tensor([1.0, 0, 1, 0, 0, 1]),
            "loss_mask": torch.tensor([1.0, 1, 0, 1, 0, 1]),
            "ptx_tokens": joined,
            "ptx_length": joined.lengths,
        }
    )


def log_probs_of(worker: RoleWorker, tokens: list[int], first: int) -> torch.Tensor:
    """Return log π of tokens `first`, first + 1, ... of one sequence, with gradient."""
    rows = random_rows(1).with_columns(
        {
            "tokens": Ragged.from_rows([tokens], torch.int64),
            "action_mask": Ragged.from_rows([[i >= first for i in range(len(tokens))]], torch.bool),
            "sequence_lengths": Ragged.from_rows([[len(tokens)]], torch.int64),
        }
    )
    return worker.predict(pack(rows, torch.device("cpu")))["log_probs"]


@pytest.mark.parametrize("max_tokens", [4096, 13])
def test_loss_and_gradient_are_those_of_the_formula(max_tokens: int, folder: Path) -> None:
    rows, worker = make_rows(), make_worker(folder, max_tokens)
    objective = Objective.of("actor", {**PARAMS, "ptx_coef": 0.7, "positive_coef": 0.3})
    sums = Sums()
    losses, counts = worker.forward_backward(objective, rows, sums), denominators(rows)
    assert set(losses) == set(objective.denominators) == {"tokens", "ptx_tokens", "positive_tokens"}
    policy, texts, right = torch.zeros(3, dtype=torch.float64).unbind()
    for i in range(6):
        of_row = log_probs_of(worker, rows["tokens"][i].tolist(), 2)
        policy = policy - rows["loss_mask"][i] * rows["advantage"][i] * of_row.sum()
        right = right - rows["correct"][i] * of_row.sum()
        if len(text := rows["ptx_tokens"][i].tolist()) > 1:
            texts = texts - log_probs_of(worker, text, 1).sum()
    used = int(rows["action_tokens"][rows["loss_mask"] > 0].sum())
    answered = int(rows["action_tokens"][rows["correct"] > 0].sum())
    assert (counts["tokens"], counts["ptx_tokens"], counts["positive_tokens"]) == (used, 10, answered)
    expected = policy / used + 0.7 * texts / 10 + 0.3 * right / answered
    assert sum(loss / counts[name] for name, loss in losses.items()) == pytest.approx(expected.item())
    assert sums.means()["actor/ptx_loss"] == pytest.approx(texts.item() / 10)
    gradient = torch.autograd.grad(expected, list(worker.model.parameters()))
    norm = torch.nn.utils.get_total_norm(gradient).item()
    assert worker.optim_step({name: counts[name] for name in objective.denominators}, 1) == pytest.approx(
        norm, rel=1e-6
    )


def test_a_term_without_tokens_is_left_out_and_the_others_trained(folder: Path) -> None:
    rows, worker = make_rows().with_columns({"correct": torch.zeros(6)}), make_worker(folder)
    objective = Objective.of("actor", {**PARAMS, "positive_coef": 0.3})
    worker.forward_backward(objective, rows, Sums())
    counts = denominators(rows)
    assert counts["positive_tokens"] == 0
    norm = worker.optim_step({name: counts[name] for name in objective.denominators}, 1)
    assert norm is not None and norm > 0


def test_a_users_aggregation_is_divided_by_its_registered_count(folder: Path) -> None:
    rows, worker = make_rows(), make_worker(folder)
    objective = Objective.of("actor", {**PARAMS, "aggregate": "per-row-tokens"})
    losses = worker.forward_backward(objective, rows, Sums())
    built_in = Objective.of("actor", {**PARAMS, "aggregate": "seq-mean-token-sum"})
    assert losses == pytest.approx(worker.forward_backward(built_in, rows, Sums()))
    assert objective.denominators == ("rows",)


def test_an_advantage_by_turn_is_repeated_over_the_turns_tokens() -> None:
    rows = Rows(
        {
            "turn_advantages": Ragged.from_rows([[0.5, -1.0], [2.0]], torch.float64),
            "turn_lengths": Ragged.from_rows([[2, 1], [3]], torch.int64),
        }
    )
    result = column_values(rows, "advantages", torch.tensor([0, 3, 6]), torch.device("cpu"))
    assert result is not None and result.tolist() == [0.5, 0.5, -1.0, 2.0, 2.0, 2.0]


def test_the_likelihood_of_observations_is_the_formula_over_trained_rows(folder: Path) -> None:
    masks = [[0, 0, 1, 1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0, 1]]
    actions = Ragged.from_rows(masks, torch.bool)
    numbers = torch.arange(len(actions.values)) % 11 + 2
    lengths = actions.lengths
    rows = random_rows(3).with_columns(
        {
            "tokens": actions.with_values(numbers),
            "action_mask": actions,
            "sequence_lengths": Ragged.from_lengths(lengths, torch.ones_like(lengths)),
            "length": lengths,
            "action_tokens": actions.with_values(actions.values.long()).row_sums(),
            "observation_tokens": torch.tensor([2, 2, 1]),
            "advantage": torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64),
            "loss_mask": torch.tensor([1.0, 1.0, 0.0]),
        }
    )
    worker, objective = make_worker(folder), Objective.of("actor", {**PARAMS, "observation_coef": 0.2})
    losses, counts = worker.forward_backward(objective, rows, Sums()), denominators(rows)
    assert counts["observation_tokens"] == 4, "the masked row does not count"
    expected = torch.zeros((), dtype=torch.float64)
    for row, places in ((0, (4, 5)), (1, (2, 3))):
        of_row = log_probs_of(worker, rows["tokens"][row].tolist(), 1)
        expected = expected - sum(of_row[place - 1] for place in places)
    assert losses["observation_tokens"] == pytest.approx(0.2 * expected.item())
