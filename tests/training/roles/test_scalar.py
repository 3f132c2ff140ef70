"""Critics and reward models read values and scores at the right tokens, load from each kind of directory, and save
back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from braidrl.algorithms.ragged import Ragged
from braidrl.data.packing import plan_micro_batches
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.observe.metrics import Sums
from braidrl.training.backends import BackendSpec
from braidrl.training.loading import load_scorer
from braidrl.training.objective import Objective, denominators
from braidrl.training.roles.worker import RoleWorker
from tests.recipes.tiny import make_config, write_decoder, write_scorer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scorers")
    write_decoder(folder / "model")
    write_scorer(folder / "scorer")
    return folder


def make_worker(folder: Path, model: str, train: bool = False, **changes: Any) -> RoleWorker:
    changes = {"dtype": "float64", "roles": {"reward": {"model": str(folder / model)}}} | changes
    return RoleWorker(BackendSpec("reward", make_config(folder, "reward_model", **changes), train, is_scalar=True))


def make_rows(sequences: list[list[list[int]]], prompts: int = 2) -> Rows:
    """Return a row per list of sequences; each sequence's first `prompts` tokens are no actions; neighbouring rows are
    pairs.
    """
    tokens = [[token for sequence in row for token in sequence] for row in sequences]
    mask = [[i >= prompts for sequence in row for i in range(len(sequence))] for row in sequences]
    return Rows(
        {
            "source": torch.zeros(len(tokens), dtype=torch.int64),
            "group": torch.arange(len(tokens)) // 2,
            "sample": torch.arange(len(tokens)) % 2,
            "tokens": Ragged.from_rows(tokens, torch.int64),
            "action_mask": Ragged.from_rows(mask, torch.bool),
            "sequence_lengths": Ragged.from_rows([[len(s) for s in row] for row in sequences], torch.int64),
            "length": torch.tensor([len(row) for row in tokens]),
            "action_tokens": torch.tensor([sum(row) for row in mask]),
        }
    )


def random_rows(count: int, seed: int = 0) -> Rows:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 12, (count,), generator=random).tolist()
    return make_rows([[torch.randint(2, 15, (length,), generator=random).tolist()] for length in lengths])


def outputs_of(folder: Path, tokens: list[int]) -> Tensor:
    """Return the head's output at each token of one sequence, computed by transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        return model.score(hidden)[:, 0]


def test_scores_equal_transformers_for_single_rows_and_padded_batches(folder: Path) -> None:
    rows = random_rows(5)
    scores = make_worker(folder, "scorer").forward("scores", rows).values
    assert scores.tolist() == pytest.approx(
        [outputs_of(folder / "scorer", row)[-1].item() for row in rows["tokens"].tolist()]
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scorer", dtype=torch.float64)
    padded = torch.nn.utils.rnn.pad_sequence([rows["tokens"][i] for i in range(5)], batch_first=True, padding_value=0)
    with torch.no_grad():
        together = model(input_ids=padded, attention_mask=(padded != 0).long()).logits[:, 0]
    assert scores.tolist() == pytest.approx(together.tolist())


def test_a_value_is_of_the_state_before_its_action(folder: Path) -> None:
    rows = random_rows(4, seed=1)
    values = make_worker(folder, "scorer").forward("values", rows)
    for row, tokens in enumerate(rows["tokens"].tolist()):
        assert values[row].tolist() == pytest.approx(outputs_of(folder / "scorer", tokens)[1:-1].tolist())


def test_row_of_several_sequences_has_one_score_and_values_in_each(folder: Path) -> None:
    first, second = [3, 4, 5, 6, 7], [8, 9, 10, 11]
    worker = make_worker(folder, "scorer")
    rows = make_rows([[first, second], [second]])
    ends = outputs_of(folder / "scorer", first), outputs_of(folder / "scorer", second)
    assert worker.forward("scores", rows).values.tolist() == pytest.approx([ends[1][-1].item()] * 2)
    assert worker.forward("values", rows)[0].tolist() == pytest.approx(
        [*ends[0][1:-1].tolist(), *ends[1][1:-1].tolist()]
    )


def test_values_and_scores_do_not_depend_on_the_micro_batches(folder: Path) -> None:
    rows = random_rows(9, seed=2)
    whole, cut = (make_worker(folder, "scorer", trainer__max_tokens_per_device=size) for size in (4096, 12))
    assert whole.forward("scores", rows).values.tolist() == pytest.approx(cut.forward("scores", rows).values.tolist())
    assert whole.forward("values", rows).values.tolist() == pytest.approx(cut.forward("values", rows).values.tolist())


def test_fresh_head_is_zero_and_export_loads_as_sequence_classification(folder: Path, tmp_path: Path) -> None:
    worker = make_worker(folder, "model", train=True)
    rows = random_rows(6)
    assert (
        worker.forward("scores", rows).values.tolist() == [0.0] * 6
        and worker.forward("values", rows).values.abs().max() == 0
    )
    for step in (1, 2, 3):
        train_once(worker, rows, step)
    worker.export(tmp_path / "saved")
    scores = worker.forward("scores", rows).values
    assert scores.std() > 0
    alone = [outputs_of(tmp_path / "saved", row)[-1].item() for row in rows["tokens"].tolist()]
    assert scores.tolist() == pytest.approx(alone)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == [
        "Qwen3ForSequenceClassification"
    ]
    other = make_worker(folder, "model", train=True)
    other.load(tmp_path / "saved")
    train_once(worker, rows, 4)
    train_once(other, rows, 4)
    assert torch.equal(worker.forward("scores", rows).values, other.forward("scores", rows).values), (
        "the optimizer resumes"
    )


def train_once(worker: RoleWorker, rows: Rows, step: int) -> float:
    objective = Objective.of("reward", {"loss": "bradley_terry", "aggregate": "seq-mean-token-mean"})
    losses = worker.forward_backward(objective, rows, Sums())
    counts = denominators(rows)
    worker.optim_step({name: counts[name] for name in objective.denominators}, step)
    return losses["rows"] / counts["rows"]


def test_pairs_share_micro_batches_and_gradients_do_not_depend_on_them(folder: Path) -> None:
    rows = random_rows(10, seed=3)
    shuffled = rows.take([7, 0, 3, 9, 4, 1, 2, 6, 5, 8])
    results = []
    for given, size in ((rows, 4096), (shuffled, 24), (rows, 40)):
        worker = make_worker(
            folder, "scorer", train=True, trainer__max_tokens_per_device=size, trainer__max_grad_norm=None
        )
        loss = train_once(worker, given, 1)
        results.append((loss, worker.model.score.weight.detach().clone()))
    margins = make_worker(folder, "scorer").forward("scores", rows).values.reshape(5, 2)
    expected = -torch.nn.functional.logsigmoid(margins[:, 0] - margins[:, 1]).mean()
    for loss, weight in results:
        assert loss == pytest.approx(float(expected))
        assert torch.allclose(weight, results[0][1], atol=1e-9)


def test_groups_are_never_split_and_an_oversized_one_is_named() -> None:
    groups = [3, 1, 3, 2, 1, 2]
    for size in (20, 25, 60):
        plan = plan_micro_batches([10, 9, 8, 7, 6, 5], size, groups=groups)
        assert sorted(row for batch in plan for row in batch) == list(range(6))
        for batch in plan:
            taken = [groups[row] for row in batch]
            assert all(taken.count(group) == 2 for group in taken)
    with pytest.raises(UserError, match=r"group 3, .*18 tokens .*trainer.max_tokens_per_device=17"):
        plan_micro_batches([10, 9, 8, 7, 6, 5], 17, groups=groups)


def test_a_frozen_role_without_a_trained_head_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"score head; train .*recipe reward_model"):
        load_scorer(folder / "model", fresh_head=False)


def test_a_classifier_of_several_labels_is_refused(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=3)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"3 labels; .*critic or reward"):
        load_scorer(tmp_path)


def test_missing_weights_are_named(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scorer", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(config | layers))
    with pytest.raises(UserError, match=r"the weights in .* lack model.layers.2"):
        load_scorer(tmp_path)
