"""`braid train --dry-run`: the devices of each runtime, what they would hold, and nothing else done."""

from __future__ import annotations

import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from braidrl.cli import app
from braidrl.errors import UserError
from braidrl.runtimes.dry_run import Seat, dry_run, peak
from tests.tiny import Workshop


def seats(found: Any) -> list[tuple[int, tuple[Seat, ...]]]:
    return [(group.devices, tuple(sorted(group.seats, key=str))) for group, _ in found]


ACTOR, CRITIC, REFERENCE = Seat("actor", True, True), Seat("critic", True, False), Seat("reference", False, False)
PPO: dict[str, Any] = {
    "flow": "ppo",
    "algorithm": {"kl_coef": 0.1, "reward": "verify"},
    "rollout": {"max_response_tokens": 8},
}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, [(1, (ACTOR, CRITIC, REFERENCE))]),
        ({"runtime": "distributed", "workers": 4}, [(4, (ACTOR, CRITIC, REFERENCE))]),
        ({"runtime": "hybrid", "placement": "split", "workers": 2}, [(2, (ACTOR,)), (2, (CRITIC, REFERENCE))]),
        (
            {"runtime": "streaming", "streaming": {"workers": {"actor.generate": 3}}},
            [(3, (Seat("actor", False, True),)), (1, (Seat("actor", True, False),)), (1, (CRITIC,)), (1, (REFERENCE,))],
        ),
    ],
)
def test_every_runtime_puts_its_roles_on_devices(workshop: Workshop, sections: Any, expected: Any) -> None:
    found = dry_run(workshop.config(**PPO, **sections), Console(file=StringIO()))
    assert sorted(seats(found), key=str) == sorted(expected, key=str)


def test_a_trained_role_takes_more_than_a_frozen_one_and_roles_take_turns(workshop: Workshop) -> None:
    ((_, footprints),) = dry_run(workshop.config(**PPO), Console(file=StringIO()))
    by_role = {one.seat.role: one for one in footprints}
    assert by_role["actor"].resident.keys() - by_role["critic"].resident.keys() == {"keys and values"}
    assert by_role["reference"].resident.keys() == {"weights"}
    working = [sum(one.working.values()) for one in footprints]
    assert peak(footprints) == sum(sum(one.resident.values()) for one in footprints) + max(working) < 2**30


def test_it_reads_no_weights_and_writes_nothing(workshop: Workshop, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(workshop.model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    shown = StringIO()
    before = sorted(workshop.folder.rglob("*"))
    config = workshop.config(model=str(bare), dtype="bfloat16", output=str(tmp_path / "runs"))
    dry_run(config, Console(file=shown, width=120))
    assert not (tmp_path / "runs").exists() and sorted(workshop.folder.rglob("*")) == sorted(
        {*before, workshop.folder / "run.yaml"}
    )
    for part in ("weights", "gradients", "master weights", "AdamW moments", "keys and values", "activations", "logits"):
        assert part in shown.getvalue()
    assert "16 rows, 1 updates" in shown.getvalue()


def test_what_a_run_would_refuse_is_refused(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no engine is called 'turbo'"):
        dry_run(workshop.config(rollout={"engine": "turbo"}))
    app(["train", str(workshop.config_file()), "--dry-run"], standalone_mode=False)
    assert "nothing was trained" in capsys.readouterr().out
