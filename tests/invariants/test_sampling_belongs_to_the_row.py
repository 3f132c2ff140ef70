"""Invariant 2: random numbers depend on (seed, purpose, stage, group, sample, position), not on other rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from braidrl.config import parse_config
from braidrl.observe.metrics import Sums
from braidrl.runtimes.row_store import Admission
from tests.tiny import MODELS, Workshop, eager_backend, recorded, settings


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_row_alone_and_among_64_has_equal_tokens(
    name: str, dtype: str, tmp_path: Path, tiny_models: dict[str, Path], sums_file: Path
) -> None:
    tree = settings(tmp_path, tiny_models[name], sums_file, flow="dapo", dtype=dtype, rollout={"slots": 64})
    backend = eager_backend(parse_config(tree))
    engine = backend.executor.generation.engines["actor"]
    if engine.speculation is not None:
        # As if a pass cost the same for any number of tokens: guesses are always made.
        engine.speculation.costs = lambda size, guessed: 1.0
    stage, rows = backend.executor.flow["actor.generate"], backend.read(Admission(range(16))).rows
    together = backend.executor.run(stage, rows, Sums())
    assert len(rows) == 64 and len({tuple(together["tokens"][i].tolist()) for i in range(64)}) > 32
    for number in (0, 17, 40, 63):
        alone = backend.executor.run(stage, rows.take([number]), Sums())
        for column in ("tokens", "rollout_log_probs"):
            assert torch.equal(alone[column][0], together[column][number]), (number, column)
    assert engine.speculated is None or engine.speculated.drafted > 0


def test_rows_do_not_depend_on_slots_or_prompts_per_step(workshop: Workshop) -> None:
    few = recorded(workshop.run("few", trainer={"steps": 1}), 1)
    many = recorded(workshop.run("many", trainer={"steps": 1, "prompts_per_step": 8}, rollout={"slots": 32}), 1)
    both = many.take([i for i, uid in enumerate(many.uids()) if uid in few.uids()])
    assert both.uids() == few.uids()
    for row in range(len(few)):
        assert torch.equal(few["tokens"][row], both["tokens"][row])
