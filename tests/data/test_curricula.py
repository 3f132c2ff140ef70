"""Curricula: which example each admission draws, from what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from braidrl.config import Config, CurriculumConfig, parse_config
from braidrl.data.curricula import CURRICULA, Curriculum, Measured, Units, check_curriculum, units_of
from braidrl.data.loader import Admissions
from braidrl.data.prompts import load_source
from braidrl.data.rows import FinishReason, Rows
from braidrl.data.sources import Reading
from braidrl.data.templates import PromptTemplate
from braidrl.errors import UserError

LEVELS = Units(("easy", "middle", "hard"), np.array([0] * 6 + [1] * 10 + [2] * 4))
EACH = Units((), np.arange(50))


def loader(lag: int = 1, seed: int = 0, **settings: Any) -> Admissions:
    """Return the admissions of two sources, one by level and one by example, the second three times as often."""
    curriculum = Curriculum(CurriculumConfig(**{"name": "gaussian", **settings}), [LEVELS, EACH], seed, lag)
    return Admissions([20, 50], [1.0, 3.0], seed, curriculum=curriculum)


def batch(admissions: Admissions, iteration: int, count: int = 8) -> tuple[list[int], list[tuple[int, int]]]:
    admissions.begin(iteration)
    numbers = list(admissions.advance(count))
    return numbers, admissions.examples(numbers)


def judged(numbers: list[int], scores: list[list[float]], failed: int | None = None) -> Rows:
    """Return index columns of groups with these scores; all rows of one group may have failed."""
    flat = torch.tensor([score for of_group in scores for score in of_group])
    group = torch.tensor([number for number, of_group in zip(numbers, scores, strict=True) for _ in of_group])
    ends = torch.where(group == failed, FinishReason.ERROR, FinishReason.STOP) if failed is not None else group * 0
    return Rows({"group": group, "score": flat, "correct": flat, "finish_reason": ends})


def play(admissions: Admissions, first: int, last: int) -> list[list[tuple[int, int]]]:
    """Draw and measure batches; an example succeeds by its index."""
    drawn = []
    for iteration in range(first, last + 1):
        numbers, examples = batch(admissions, iteration)
        drawn.append(examples)
        admissions.measure(iteration, judged(numbers, [[index % 3 / 2] * 2 for _, index in examples]))
    return drawn


def test_units_are_drawn_in_proportion_to_their_weights_for_any_count() -> None:
    curriculum = Curriculum(CurriculumConfig(name="bands", by="level"), [LEVELS], 3, 1)
    curriculum.averages[0][:] = [[1.0, 1.0], [0.5, 0.5], [0.0, 0.0]]
    curriculum.groups[0][:] = 1
    curriculum.begin(1)
    units = [int(LEVELS.of_example[curriculum.draw(number, 0).example]) for number in range(400)]
    share = 1 / 1.1
    for count in (20, 100, 400):
        assert abs(units[:count].count(1) - share * count) <= 3


def test_examples_of_a_unit_repeat_only_after_all_of_them_came() -> None:
    curriculum = Curriculum(CurriculumConfig(name="bands", by="level"), [LEVELS], 0, 1)
    curriculum.begin(1)
    drawn = [curriculum.draw(number, 0).example for number in range(60)]
    for unit, size in ((0, 6), (1, 10), (2, 4)):
        mine = [index for index in drawn if LEVELS.of_example[index] == unit]
        assert len(set(mine[:size])) == size


def test_sources_keep_the_shares_of_their_weights() -> None:
    drawn = [source for batch in play(loader(), 1, 30) for source, _ in batch]
    assert abs(drawn.count(1) - 0.75 * len(drawn)) <= 1


def test_a_batch_uses_measurements_up_to_the_lag_and_none_after_it() -> None:
    known, ahead = loader(lag=2), loader(lag=2)
    for admissions in (known, ahead):
        play(admissions, 1, 3)
    _, expected = batch(known, 5)
    numbers, _ = batch(ahead, 4)
    ahead.measure(4, judged(numbers, [[1.0]] * 8))
    ahead.admitted -= 8
    assert batch(ahead, 5)[1] == expected
    ready = [ahead.is_ready(iteration) for iteration in (5, 6, 7)]
    assert ready == [True, True, False]


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_restored_curriculum_draws_as_the_uninterrupted_one(lag: int, stop: int) -> None:
    whole = play(loader(lag, seed=5), 1, 9)
    first, resumed = loader(lag, seed=5), loader(lag, seed=5)
    begun = play(first, 1, stop)
    play(resumed, 1, 2)
    resumed.restore(json.loads(json.dumps(first.state())))
    assert begun + play(resumed, stop + 1, 9) == whole


def test_failed_rows_and_groups_that_it_did_not_draw_do_not_count() -> None:
    admissions = loader()
    numbers, examples = batch(admissions, 1, 4)
    rows = Rows.cat([judged(numbers, [[1.0, 0.0]] * 4, failed=numbers[0]), judged([999], [[1.0]], failed=5)])
    admissions.measure(1, rows)
    assert admissions.curriculum is not None
    records = admissions.curriculum.state()["averages"]
    assert sum(len(of_source) for of_source in records) == len({*examples[1:]})
    assert all(fast == slow == 0.5 for of_source in records for _, fast, slow, _ in of_source)


def test_built_in_curricula_weigh_as_their_formulas() -> None:
    rates, moved = [float("nan"), 0.0, 0.25, 0.5, 0.9], [0.0, 0.1, 0.2, 0.0, 0.05]
    measured = Measured(np.array(rates), np.array(moved), np.array([0, 1, 1, 1, 1]))
    expected = {
        "bands": [1.0, 0.05, 1.0, 1.0, 0.05],
        "gaussian": [1.0, *(max(math.exp(-((r - 0.5) ** 2) / 0.08), 0.02) for r in rates[1:])],
        "progress": [1.0, *(max(m / 0.2, 0.1) for m in moved[1:])],
    }
    assert list(CURRICULA) == list(expected)
    for name, weights in expected.items():
        assert np.allclose(CURRICULA.find(name)(measured), weights)


def ones(measured: Measured, *, share: float = 1.0) -> Any:
    return share * np.ones(3)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": "gausian"}, "gaussian"),
        ({"name": "bands", "params": {"hihg": 1}}, "high"),
        ({"name": f"{__name__}:ones"}, "for each unit"),
    ],
)
def test_a_wrong_curriculum_is_refused_before_a_model_loads(settings: dict[str, Any], named: str) -> None:
    config = parse_config({"flow": "grpo", "model": "m", "data": {"train": "d.jsonl", "curriculum": settings}})
    with pytest.raises(UserError, match=named):
        check_curriculum(config, ["score", "finish_reason"])


def test_a_field_that_an_example_lacks_is_named_with_its_line(tmp_path: Path, plain_tokenizer: Any) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "1", "level": {"n": 1}}\n{"prompt": "2", "level": {"n": 2}}\n{"prompt": "3"}\n')
    config = parse_config(
        {"flow": "grpo", "model": "m", "data": {"train": str(path), "curriculum": {"name": "bands", "by": "level.n"}}}
    )

    def units(config: Config) -> list[Units]:
        template = PromptTemplate(plain_tokenizer)
        return units_of(config, [load_source(Reading(source), config.data, template) for source in config.data.train])

    with pytest.raises(UserError, match="line 3"):
        units(config)
    first = config.data.train[0].model_copy(update={"first": 2})
    known = units(config.model_copy(update={"data": config.data.model_copy(update={"train": [first]})}))
    assert known[0].names == ("1", "2") and known[0].of_example.tolist() == [0, 1]
