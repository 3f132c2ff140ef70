"""A run's checkpoints: their content beside the models, and how they are written, one at a time.

They are written at once, or from copies in a thread while the next steps run:

step N ──copies──▶ thread: write ─▶ sync ─▶ rename ─▶ `latest`
step N + 1 ...         │
step N + 2 ◀──error?───┘
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from braidrl.config import Config
from braidrl.errors import UserError, first_line
from braidrl.flow.selecting import Selection
from braidrl.runtimes.interfaces import Backend, BegunBatch, Position
from braidrl.runtimes.saving.background import TROUBLES, BackgroundWriter, write
from braidrl.runtimes.saving.folders import (
    begin_whole,
    checkpoint_folder,
    checkpoints_of,
    discarded_on_error,
    finish_checkpoint,
    finish_whole,
    latest_checkpoint,
    partial_path,
    read_state,
    whole_folder,
)
from braidrl.runtimes.saving.manifest import MANIFEST, damage, write_manifest
from braidrl.training.roles.checkpoint import Write

FORMAT = 2
"""Since format 2 a checkpoint has a manifest, which is checked; format 1 is read unchecked."""
LEFT_OUT = "-left-out"


@dataclass(frozen=True)
class RunState:
    """The run after `step` complete iterations; the same under every runtime.

    `surplus` holds tables of the backend, or their files in a checkpoint; so do the tables of the batches in `begun`.
    """

    step: int
    version: int
    loader: dict[str, Any]
    sampling: dict[str, Any]
    surplus: list[Any] = field(default_factory=list)
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    begun: Sequence[BegunBatch] = field(default_factory=list)
    fingerprints: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one rank; the `first` rank writes shared files."""

    def __init__(self, run: Path, config: Config, first: bool) -> None:
        self.run, self.keep_last, self.first = run, config.trainer.keep_checkpoints, first
        self.in_background = config.trainer.checkpoint_async
        self.learning = True
        """False while optimizer steps are skipped: an older checkpoint may be the last one that can be trained on."""
        self._writing = BackgroundWriter()
        self._step = 0

    def save(self, state: RunState, backend: Backend[Any]) -> None:
        """Write a checkpoint, or start to. Raises UserError if it, or the previous one, could not be written."""
        self.wait()
        self._step = state.step
        with self._explained():
            if self.in_background:
                self._begin(state, backend)
            else:
                save_checkpoint(self.run, state, backend, self._kept, self.first)

    def check(self) -> None:
        """Raise UserError if the background write has failed by now."""
        with self._explained():
            self._writing.check()

    def wait(self) -> None:
        """Wait for the background write. Raises UserError if it failed."""
        with self._explained():
            self._writing.wait()

    def _begin(self, state: RunState, backend: Backend[Any]) -> None:
        path = checkpoint_folder(self.run, state.step)
        if not self.first:
            parts = backend.copy_for_saving(partial_path(path))
            save_rows(path, state, backend)
            self._writing.begin(parts)
            return
        partial = begin_whole(path)
        with discarded_on_error(partial):
            parts = backend.copy_for_saving(partial)
            save_rows(partial, state, backend)
            write_state(partial, state)
        kept = self._kept
        self._writing.begin([lambda: self._finish(path, parts, state.step, kept)])

    @property
    def _kept(self) -> int | None:
        return self.keep_last if self.learning else None

    def _finish(self, path: Path, parts: Sequence[Write], step: int, kept: int | None) -> None:
        with discarded_on_error(partial_path(path)):
            write(parts)
            write_manifest(partial_path(path))
            finish_whole(path)
        finish_checkpoint(self.run, step, kept)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise UserError, in one line, for a checkpoint that could not be written."""
        try:
            yield
        except TROUBLES as error:
            raise UserError(
                f"the checkpoint of step {self._step} could not be written ({first_line(error)}); the one before it is whole: "
                f"make room and go on with `braid train --resume {self.run}`"
            ) from error


def save_checkpoint(
    run: Path, state: RunState, backend: Backend[Any], keep_last: int | None, write: bool = True
) -> None:
    """Write a checkpoint whole, point `latest` at it and remove the oldest. Raises OSError for a full disk.

    Ranks without `write` send their state to the writing rank, or write their shards beside it.
    """
    if not write:
        backend.save(partial_path(checkpoint_folder(run, state.step)))
        save_rows(checkpoint_folder(run, state.step), state, backend)
        return
    with whole_folder(checkpoint_folder(run, state.step)) as folder:
        backend.save(folder)
        save_rows(folder, state, backend)
        write_state(folder, state)
        write_manifest(folder)
    finish_checkpoint(run, state.step, keep_last)


def save_rows(folder: Path, state: RunState, backend: Backend[Any]) -> None:
    """Put surplus rows, and rows of batches that were started ahead, into a checkpoint."""
    for number, table in enumerate(state.surplus):
        backend.save_rows(surplus_path(folder, number), table)
    for number, batch in enumerate(state.begun):
        backend.save_rows(begun_path(folder, number), batch.table)
        backend.save_rows(begun_path(folder, number, LEFT_OUT), batch.left_out)
        for other, table in enumerate(batch.after.surplus):
            backend.save_rows(begun_path(folder, number, f"-surplus-{other}"), table)


def write_state(folder: Path, state: RunState) -> None:
    """Write counters and states into a checkpoint."""
    plain = {"format": FORMAT, "step": state.step, "version": state.version, "surplus": len(state.surplus)}
    parts = {
        "loader": state.loader,
        "sampling": state.sampling,
        "stages": state.stages,
        "fingerprints": state.fingerprints,
    }
    begun = [
        {"iteration": batch.iteration, "outcome": asdict(batch.outcome), "reports": batch.reports}
        | {"loader": batch.after.loader, "sampling": batch.after.sampling, "surplus": len(batch.after.surplus)}
        for batch in state.begun
    ]
    (folder / "state.json").write_text(json.dumps({**plain, **parts, "begun": begun}))


def resume_point(run: Path, newest_whole: bool = False) -> Path | None:
    """Return the checkpoint to resume from, with each of its files checked; None before the first.

    Args:
        run: The run's folder.
        newest_whole: If the latest checkpoint is damaged, use the newest complete one.

    Raises UserError for a damaged one; it names the file, the newest complete checkpoint and the command to resume from it.
    """
    latest = latest_checkpoint(run)
    trouble = checkpoint_damage(latest) if latest else ""
    if latest is None or not trouble:
        return latest
    whole = next(
        (other for other in reversed(checkpoints_of(run)) if other != latest and not checkpoint_damage(other)), None
    )
    if whole is None:
        raise UserError(
            f"{latest}: {trouble}, and no other checkpoint of the run is whole; copy one back, or begin anew"
        )
    if not newest_whole:
        command = f"braid train --resume {run} --newest-whole"
        raise UserError(f"{latest}: {trouble}; {whole.name} is whole, go on from it with `{command}`")
    return whole


def checkpoint_damage(folder: Path) -> str:
    """Return the damage of a checkpoint, or an empty string; the first format has no manifest and is not checked."""
    if (folder / MANIFEST).is_file() or not (folder / "state.json").is_file():
        return damage(folder)
    try:
        return "" if read_state(folder).get("format") == 1 else damage(folder)
    except UserError:
        return damage(folder)


def load_checkpoint(folder: Path) -> tuple[Path, RunState]:
    """Return the folder and its state. Raises UserError for a folder that is not a checkpoint of a known format."""
    state = read_state(folder)
    if state.get("format") not in (1, FORMAT):
        raise UserError(f"{folder} has checkpoint format {state.get('format')}; this version reads 1 and {FORMAT}")
    surplus = [surplus_path(folder, number) for number in range(state["surplus"])]
    begun = [begun_batch(folder, number, known) for number, known in enumerate(state.get("begun", []))]
    return folder, RunState(
        state["step"],
        state["version"],
        state["loader"],
        state["sampling"],
        surplus,
        state.get("stages", {}),
        begun,
        state.get("fingerprints", {}),
    )


def begun_batch(folder: Path, number: int, known: Mapping[str, Any]) -> BegunBatch:
    """Return a batch that was started before a checkpoint, from its files and the state saved with it."""
    surplus = [begun_path(folder, number, f"-surplus-{other}") for other in range(known["surplus"])]
    after = Position(known["loader"], known["sampling"], surplus, {})
    fields: dict[str, Any] = {n: v if n == "dropped" else tuple(v) for n, v in known["outcome"].items()}
    table, left_out = begun_path(folder, number), begun_path(folder, number, LEFT_OUT)
    return BegunBatch(known["iteration"], table, left_out, Selection(**fields), known["reports"], after)


def begun_path(folder: Path, number: int, part: str = "") -> Path:
    return folder / f"begun-{number}{part}.rows"


def surplus_path(folder: Path, number: int) -> Path:
    return folder / f"surplus-{number}.rows"
