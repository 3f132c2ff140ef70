"""Placement by role: pools get their names and partitions, and wrong placements are refused before any worker
starts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from braidrl.cluster.pools import place
from braidrl.config import PlacementConfig, parse_config
from braidrl.errors import UserError

ROLES = ("actor", "reference", "critic")


def pools(placement: Any, workers: int = 1) -> list[tuple[tuple[str, ...], int]]:
    config = parse_config({"flow": "ppo", "model": "m", "placement": placement}).placement
    return [(pool.roles, pool.workers) for pool in place(config, ROLES, ("actor",), workers)]


def refused(placement: Any) -> str:
    with pytest.raises(UserError) as caught:
        pools(placement)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_placement_names_group_the_roles_as_documented() -> None:
    assert pools("colocate", 2) == [(ROLES, 2)]
    assert pools("standalone") == [(("actor",), 1), (("reference",), 1), (("critic",), 1)]
    assert pools("split", 4) == [(("actor",), 4), (("reference", "critic"), 4)]


def test_a_flow_whose_only_role_generates_has_one_pool_when_split() -> None:
    assert [p.roles for p in place(PlacementConfig(name="split"), ("actor",), ("actor",), 1)] == [("actor",)]


def test_any_partition_of_the_roles_can_be_written() -> None:
    assert pools([["actor", "critic"], ["reference"]], 3) == [(("actor", "critic"), 3), (("reference",), 3)]
    sized = {"pools": [{"roles": ["actor"], "workers": 4}, {"roles": ["critic", "reference"]}]}
    assert pools(sized, 2) == [(("actor",), 4), (("critic", "reference"), 2)]


def test_a_role_may_generate_in_another_pool_of_another_size() -> None:
    sized = [{"roles": ["actor.generate"], "workers": 4}, ["actor", "reference"], ["critic"]]
    config = parse_config({"flow": "ppo", "model": "m", "placement": sized}).placement
    result = [(p.name, p.models, p.generating, p.workers) for p in place(config, ROLES, ("actor",), 2)]
    assert result == [
        ("actor.generate", (), ("actor",), 4),
        ("actor+reference", ("actor", "reference"), (), 2),
        ("critic", ("critic",), (), 2),
    ]
    together = place(PlacementConfig(name="split"), ROLES, ("actor",), 1)
    assert [p.generating for p in together] == [("actor",), ()]
    assert "which generates there anyway; remove actor.generate" in refused([["actor", "actor.generate"], ["critic"]])
    assert "names 'critic.generate', which is no model" in refused(
        [["actor", "reference"], ["critic", "critic.generate"]]
    )


def test_a_written_configuration_is_read_back_as_it_was() -> None:
    config = parse_config({"flow": "ppo", "model": "m", "placement": [["actor", "critic"], ["reference"]]})
    assert parse_config(config.model_dump(mode="json")) == config


def test_roles_that_are_missing_unknown_or_in_two_pools_are_refused() -> None:
    assert re.match("placement: reference .*write placement=colocate$", refused([["actor", "critic"]]))
    assert "pool 1 names 'critik'" in refused([["actor"], ["critik"]])
    assert "pools overlap: actor is" in refused([["actor"], ["actor", "critic"]])
    assert "no placement is called 'colocated'" in refused("colocated")


@pytest.mark.parametrize("placement", [[[]], {"pools": [{"roles": ["actor"], "workers": 0}]}, {"pool": []}])
def test_malformed_pools_are_refused_by_the_configuration(placement: Any) -> None:
    with pytest.raises(UserError, match=r"placement|pool"):
        parse_config({"flow": "ppo", "model": "m", "placement": placement})


def test_workers_are_counted_from_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="workers"):
        parse_config({"flow": "ppo", "model": str(tmp_path), "workers": 0})
