"""What a checkpoint holds beside the models: counters, the loader, selection, surplus rows, stages' states."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidrl.errors import UserError
from braidrl.runtimes.backend import Backend
from braidrl.runtimes.saving.folders import checkpoint_folder, finish_checkpoint, partial_path, read_state, whole_folder

FORMAT = 1


@dataclass(frozen=True)
class RunState:
    """The run after `step` complete iterations; the same under every runtime.

    `surplus` are tables of the backend, or the files that hold them in a checkpoint.
    """

    step: int
    version: int
    loader: dict[str, Any]
    sampling: dict[str, Any]
    surplus: list[Any] = field(default_factory=list)
    stages: dict[str, dict[str, float]] = field(default_factory=dict)


def save_checkpoint(run: Path, state: RunState, backend: Backend[Any], keep: int, write: bool = True) -> None:
    """Writes a checkpoint whole, points `latest` at it and removes the oldest. Raises OSError where the disk is full.

    Ranks that do not `write` give what they hold to the one that does, or write their part of it beside.
    """
    if not write:
        backend.save(partial_path(checkpoint_folder(run, state.step)))
        save_surplus(checkpoint_folder(run, state.step), state, backend)
        return
    with whole_folder(checkpoint_folder(run, state.step)) as folder:
        backend.save(folder)
        save_surplus(folder, state, backend)
        write_state(folder, state)
    finish_checkpoint(run, state.step, keep)


def save_surplus(folder: Path, state: RunState, backend: Backend[Any]) -> None:
    """Puts the rows that no batch has had room for into a checkpoint."""
    for number, table in enumerate(state.surplus):
        backend.save_rows(surplus_path(folder, number), table)


def write_state(folder: Path, state: RunState) -> None:
    """Writes the rest of it."""
    plain = {"format": FORMAT, "step": state.step, "version": state.version, "surplus": len(state.surplus)}
    parts = {"loader": state.loader, "sampling": state.sampling, "stages": state.stages}
    (folder / "state.json").write_text(json.dumps({**plain, **parts}))


def load_checkpoint(folder: Path) -> tuple[Path, RunState]:
    """The folder and the state in it. Raises UserError for a folder that is no checkpoint of this format."""
    state = read_state(folder)
    if state.get("format") != FORMAT:
        raise UserError(f"{folder} has checkpoint format {state.get('format')}; this version reads {FORMAT}")
    surplus = [surplus_path(folder, number) for number in range(state["surplus"])]
    return folder, RunState(
        state["step"], state["version"], state["loader"], state["sampling"], surplus, state.get("stages", {})
    )


def surplus_path(folder: Path, number: int) -> Path:
    return folder / f"surplus-{number}.rows"
