"""What a checkpoint holds beside the models: counters, the loader, selection, surplus rows, stages' states."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidrl.data.codec import decode, encode
from braidrl.data.frames import join, split
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.runtimes.folders import checkpoint_folder, finish_checkpoint, read_state, whole_folder

FORMAT = 1


@dataclass(frozen=True)
class RunState:
    """The run after `step` complete iterations; the same under every runtime."""

    step: int
    version: int
    loader: dict[str, Any]
    sampling: dict[str, Any]
    surplus: list[Rows] = field(default_factory=list)


def save_checkpoint(run: Path, state: RunState, save_models: Callable[[Path], None], keep: int) -> None:
    """Writes a checkpoint whole, points `latest` at it and removes the oldest. Raises OSError where the disk is full."""
    with whole_folder(checkpoint_folder(run, state.step)) as folder:
        save_models(folder)
        for number, rows in enumerate(state.surplus):
            (folder / f"surplus-{number}.rows").write_bytes(join(encode(rows)))
        plain = {"format": FORMAT, "step": state.step, "version": state.version, "surplus": len(state.surplus)}
        (folder / "state.json").write_text(json.dumps({**plain, "loader": state.loader, "sampling": state.sampling}))
    finish_checkpoint(run, state.step, keep)


def load_checkpoint(folder: Path) -> tuple[Path, RunState]:
    """The folder and the state in it. Raises UserError for a folder that is no checkpoint of this format."""
    state = read_state(folder)
    if state.get("format") != FORMAT:
        raise UserError(f"{folder} has checkpoint format {state.get('format')}; this version reads {FORMAT}")
    surplus = [decode(split((folder / f"surplus-{n}.rows").read_bytes())) for n in range(state["surplus"])]
    return folder, RunState(state["step"], state["version"], state["loader"], state["sampling"], surplus)
