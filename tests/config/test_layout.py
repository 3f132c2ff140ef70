"""Layouts must multiply to the number of devices and divide the model; otherwise one line names the mismatch."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from braidrl.config.layout import ParallelLayout
from braidrl.errors import UserError


def test_the_data_axis_takes_the_devices_that_the_others_leave() -> None:
    assert ParallelLayout().resolve(1).data == 1
    assert ParallelLayout(shard="full").resolve(6).data == 6
    assert ParallelLayout(tensor=2, sequence=2).resolve(8).data == 2
    given = ParallelLayout(pipeline=2, data=2)
    assert given.resolve(4) == given and given.ranks_per_replica == 2


def test_only_a_layout_without_sharding_is_replicated() -> None:
    assert ParallelLayout(data=4).is_replicated
    for other in ({"shard": "full"}, {"shard": "optimizer"}, {"tensor": 2}, {"sequence": 2}, {"pipeline": 2}):
        assert not ParallelLayout.model_validate(other).is_replicated


@pytest.mark.parametrize("given", [{"tensor": 2, "data": 3}, {"tensor": 3}, {"data": 2}, {"sequence": 8}])
def test_axes_whose_product_differs_from_the_devices_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"roles.actor.layout: .* 4; write numbers") as caught:
        ParallelLayout.model_validate(given).resolve(4, "roles.actor.layout")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": 2}, "nodes=2 has no shards; write shard=full"),
        ({"nodes": 3, "shard": "full"}, "nodes=3 .*data 4; write shard=full .*nodes"),
    ],
)
def test_nodes_without_shards_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        ParallelLayout.model_validate(given).resolve(4)
    assert "\n" not in str(caught.value)
    layout = ParallelLayout(nodes=2, shard="full", sequence=2).resolve(8)
    assert layout.data == 4 and layout.shard_ranks == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensor": 3}, "4 attention heads, which tensor=3"),
        ({"tensor": 2, "sequence": 2}, "2 key/value heads, .*tensor=2 times sequence=2"),
        ({"pipeline": 4}, "6 layers, which pipeline=4"),
    ],
)
def test_axes_that_do_not_divide_the_model_are_refused(given: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ParallelLayout.model_validate(given).check_model(heads=4, key_value_heads=2, layers=6)
    ParallelLayout(tensor=2, pipeline=3).check_model(heads=4, key_value_heads=2, layers=6)


def test_axes_are_positive_and_have_these_names_alone() -> None:
    for wrong in ({"tensor": 0}, {"experts": 2}, {"shard": "zero"}):
        with pytest.raises(ValidationError):
            ParallelLayout.model_validate(wrong)
