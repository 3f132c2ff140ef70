"""Pipeline stages equal the full model, and padding does not change rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.data.rows import Rows
from braidrl.training.backends import BackendSpec
from braidrl.training.compute.packed import FILLER, Packed, pack, saves_enough
from braidrl.training.loading import load_scorer
from braidrl.training.parallel.pipeline import RUN, local_layers, runs, split_layers
from braidrl.training.roles.worker import RoleWorker
from braidrl.weights.shards import shapes_of
from tests.tiny import TOKENIZER
from tests.training.compute.test_shared_prompts import rows_of
from tests.training.parallel.laid_out import config_of, make_rows

CPU = torch.device("cpu")


def stage_of(model: Path, stage: int, stages: int = 2) -> RoleWorker:
    worker = RoleWorker(BackendSpec("actor", config_of(str(model)), train=False))
    split_layers(worker.model, stage, stages)
    return worker


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_pipeline_stages_in_sequence_equal_the_full_model(name: str, tiny_models: dict[str, Path]) -> None:
    whole, packed = (
        RoleWorker(BackendSpec("actor", config_of(str(tiny_models[name])), train=False)),
        pack(make_rows(), CPU),
    )
    first, last = stage_of(tiny_models[name], 0), stage_of(tiny_models[name], 1)
    with torch.no_grad():
        hidden = first.hidden_states(packed)[None]
        predicted, expected = last.predict(replace(packed, hidden=hidden)), whole.predict(packed)
    assert all(torch.equal(predicted[key], values) for key, values in expected.items())


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_stages_have_equal_layers_and_the_names_of_the_whole_model(name: str, tiny_models: dict[str, Path]) -> None:
    whole = shapes_of(RoleWorker(BackendSpec("actor", config_of(str(tiny_models[name])), train=False)).model)
    parts = [shapes_of(stage_of(tiny_models[name], stage).model) for stage in (0, 1)]
    assert parts[0] | parts[1] == whole
    # Both have the weight that embedding and output layer share.
    assert parts[0].keys() & parts[1].keys() == ({"model.embed_tokens.weight"} if name == "qwen2" else set())
    assert [sum(".layers." in key for key in part) for part in parts] == [
        sum(".layers." in key for key in whole) // 2
    ] * 2


def test_a_scorers_head_is_on_its_last_stage(tiny_models: dict[str, Path]) -> None:
    first, last = load_scorer(tiny_models["qwen3"]), load_scorer(tiny_models["qwen3"])
    split_layers(first, 0, 2)
    split_layers(last, 1, 2)
    assert "score.weight" not in shapes_of(first) and "score.weight" in shapes_of(last)
    assert len(local_layers(first)) == len(local_layers(last)) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_padding_tokens_do_not_change_the_rows(shared: bool, tiny_models: dict[str, Path]) -> None:
    rows: Rows = rows_of() if shared else make_rows()
    rows = rows.with_columns({"tokens": rows["tokens"].with_values(rows["tokens"].values % len(TOKENIZER))})
    assert saves_enough(rows) == shared
    packed: Packed = pack(rows, CPU, share_prompts=shared)
    worker = RoleWorker(BackendSpec("actor", config_of(str(tiny_models["qwen2"])), train=False))
    expected = worker.predict(packed)["log_probs"]
    for more in (0, 1, 2 * FILLER + 3):
        filled = packed.padded(len(packed.input_ids) + more)
        assert len(filled.input_ids) == len(filled.position_ids) == len(packed.input_ids) + more
        torch.testing.assert_close(worker.predict(filled)["log_probs"], expected, rtol=0, atol=1e-12)


@given(st.integers(0, 400), st.integers(2, 8))
def test_runs_hold_every_micro_batch_once_and_never_too_many(micro_batches: int, stages: int) -> None:
    result = runs(micro_batches, stages)
    assert [number for run in result for number in run.tolist()] == list(range(micro_batches))
    assert all(min(micro_batches, stages) <= len(run) <= RUN * stages for run in result)
