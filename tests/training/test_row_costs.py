"""Costs of rows with images: a trained tower's work, in tokens, is shared out equally over ranks and micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText

from braidrl.config import Config, ImagesConfig, parse_config
from braidrl.data.packing import Preferred, balanced_partition, imbalance, plan_micro_batches
from braidrl.data.rows import Rows
from braidrl.data.vision import IMAGE_TOKENS, ImageSpan, image_columns
from braidrl.training.memory.footprint import model_shape
from braidrl.training.operations import tower_operations
from braidrl.training.processors import load_vision
from braidrl.training.row_costs import balance_of, image_token_cost
from tests.tiny import ROOT, load_module

shapes = load_module(ROOT / "examples" / "vision" / "shapes.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = shapes.write_model(tmp_path_factory.mktemp("seeing") / "model", 0)
    return folder


def config_of(model: Path, kept_mib: float = 512, **trainer: object) -> Config:
    return parse_config(
        {
            "flow": "grpo",
            "model": str(model),
            "data": {"train": "x.jsonl", "images": {"kept_mib": kept_mib}},
            "trainer": trainer,
        }
    )


def rows_of(lengths: list[int], images: list[int], groups: list[int] | None = None) -> Rows:
    columns = {"group": groups or range(len(lengths)), "length": lengths, IMAGE_TOKENS: images}
    return Rows({name: torch.tensor(list(values)) for name, values in columns.items()})


def test_a_towers_operations_are_those_of_its_matrices(model: Path, tmp_path: Path) -> None:
    vision = load_vision(model, ImagesConfig(folder=tmp_path / "store"))
    assert vision is not None
    name = vision.store.add(shapes.draw({0: ("square", "red")}), tmp_path)
    # Of a tower with many layers the mergers, which run once for four patches, are a small part.
    config = AutoConfig.from_pretrained(model)
    config.vision_config.depth = 32
    config.save_pretrained(tmp_path)
    whole = AutoModelForImageTextToText.from_config(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        whole.model.get_image_features(**vision.pixels(name))
    counted = tower_operations(model_shape(tmp_path, torch.float32), len(vision.expansion(name)))
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.2)


def test_a_trained_tower_costs_its_work_and_a_frozen_one_only_where_nothing_is_kept(model: Path) -> None:
    trained = image_token_cost("actor", config_of(model, train_vision=True), True)
    assert trained > 0 and image_token_cost("actor", config_of(model, train_vision=True), False) == trained
    assert image_token_cost("actor", config_of(model), True) == 0
    again = config_of(model, kept_mib=0)
    assert image_token_cost("actor", again, False) == trained
    assert image_token_cost("actor", again, True) == pytest.approx(trained / 3)
    adapters = config_of(model, kept_mib=0, lora={"rank": 4})
    assert image_token_cost("actor", adapters, True) == pytest.approx(trained / 2)


def test_ranks_get_equal_work_where_some_rows_have_large_images(model: Path) -> None:
    config = config_of(model, train_vision=True)
    generator = torch.Generator().manual_seed(0)
    images = (torch.randint(0, 5, (64,), generator=generator) * 60).tolist()
    lengths = [50 + count + int(torch.randint(0, 300, (), generator=generator)) for count in images]
    rows, price = rows_of(lengths, images), image_token_cost("actor", config, True)
    work = [length + price * count for length, count in zip(lengths, images, strict=True)]
    costs, _ = balance_of(rows, "actor", config, True, 4)
    assert imbalance(work, balanced_partition(costs.tolist(), 4)) < 1.01
    assert imbalance(work, balanced_partition(lengths, 4)) > 1.03
    assert torch.equal(balance_of(rows, "actor", config_of(model), True, 4)[0], rows["length"]), "a frozen tower"
    assert torch.equal(balance_of(rows, None, config, True, 4)[0], rows["length"]), "a stage without a model"


def test_a_group_stays_on_one_rank_which_encodes_its_image_once_unless_others_would_wait(model: Path) -> None:
    config = config_of(model, train_vision=True)
    many = rows_of([100] * 32, [80] * 32, groups=[number // 4 for number in range(32)])
    groups = balance_of(many, "actor", config, True, 4)[1]
    assert groups is not None and torch.equal(groups, many["group"])
    few = rows_of([1000] * 8, [8] * 8, groups=[0] * 4 + [1] * 4)
    assert balance_of(few, "actor", config, True, 4)[1] is None
    assert torch.equal(balance_of(few, "actor", config, True, 4, whole_groups=True)[1], few["group"])
    assert balance_of(many, "actor", config_of(model), True, 4)[1] is None, "a frozen tower"


def test_micro_batches_share_the_work_on_images_within_their_tokens() -> None:
    plan = plan_micro_batches([100] * 4, 200, preferred=Preferred([1.0, 1.0, 5.0, 5.0]))
    assert [2, 3] not in plan, "one large image in each"
    plan = plan_micro_batches([100] * 4, 200, preferred=Preferred([1.0] * 4, [0, 1, 0, 1]))
    assert sorted(plan) == [[0, 2], [1, 3]], "an image is encoded once"
    plan = plan_micro_batches([60] * 6, 120, preferred=Preferred([1.0] * 6, [0, 0, 0, 0, 0, 1]))
    assert sorted(plan) == [[0, 1], [2, 3], [4, 5]], "a group that is too large is split"
    lengths, groups = [60, 60, 60, 60, 60, 60], [0, 0, 0, 1, 1, 1]
    assert len(plan_micro_batches(lengths, 240)) == 2
    assert sorted(plan_micro_batches(lengths, 240, preferred=Preferred([1.0] * 6, groups))) == [[0, 1, 2], [3, 4, 5]]


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 5), st.integers(0, 300)), max_size=40))
def test_costs_of_images_keep_every_row_once_within_the_limit(drawn: list[tuple[int, int, int]]) -> None:
    lengths, groups, extra = ([each[part] for each in drawn] for part in range(3))
    preferred = Preferred([length + more for length, more in zip(lengths, extra, strict=True)], groups)
    plan, least = plan_micro_batches(lengths, 150, preferred=preferred), plan_micro_batches(lengths, 150)
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    assert all(part and sum(lengths[row] for row in part) <= 150 for part in plan)
    assert len(plan) <= 3 * max(1, len(least)) // 2


def test_rows_name_the_tokens_of_their_images() -> None:
    columns = image_columns([[ImageSpan("a", 3, 9), ImageSpan("b", 20, 4)], []])
    assert columns[IMAGE_TOKENS].tolist() == [13, 0]
