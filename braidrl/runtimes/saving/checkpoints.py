"""Writes a run's checkpoints one at a time: at once, or from copies in a thread while the next steps are made.

step N ──copies──▶ thread: write ─▶ sync ─▶ rename ─▶ `latest`
step N + 1 ...         │
step N + 2 ◀──error?───┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from braidrl.config import Config
from braidrl.errors import UserError
from braidrl.models.checkpoint import Write
from braidrl.runtimes.backend import Backend
from braidrl.runtimes.saving.background import TROUBLES, line_about, write
from braidrl.runtimes.saving.folders import (
    begin_whole,
    checkpoint_folder,
    discarded_on_error,
    finish_checkpoint,
    finish_whole,
    partial_path,
)
from braidrl.runtimes.saving.state import RunState, save_checkpoint, save_surplus, write_state


class Checkpoints:
    """Of one rank; the `first` one writes what is written once."""

    def __init__(self, run: Path, config: Config, first: bool) -> None:
        self.run, self.keep, self.first = run, config.trainer.keep_checkpoints, first
        self.beside = config.trainer.checkpoint_async
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._begun: Future[None] | None = None
        self._step = 0

    def save(self, state: RunState, backend: Backend[Any]) -> None:
        """Writes a checkpoint, or begins to. Raises UserError where it, or the one before it, could not be written."""
        self.wait()
        self._step = state.step
        with self._told():
            if self.beside:
                self._begin(state, backend)
            else:
                save_checkpoint(self.run, state, backend, self.keep, self.first)

    def check(self) -> None:
        """Raises UserError where what was begun has failed by now."""
        if self._begun is not None and self._begun.done():
            self.wait()

    def wait(self) -> None:
        """Returns when what was begun is written. Raises UserError where it could not be."""
        if self._begun is None:
            return
        with self._told():
            # An interrupt leaves it to the next call.
            error = self._begun.exception()
            self._begun = None
            if error is not None:
                raise error

    def _begin(self, state: RunState, backend: Backend[Any]) -> None:
        path = checkpoint_folder(self.run, state.step)
        if not self.first:
            parts = backend.copy_for_saving(partial_path(path))
            save_surplus(path, state, backend)
            self._begun = self._thread.submit(write, parts)
            return
        partial = begin_whole(path)
        with discarded_on_error(partial):
            parts = backend.copy_for_saving(partial)
            save_surplus(partial, state, backend)
            write_state(partial, state)
        self._begun = self._thread.submit(self._finish, path, parts, state.step)

    def _finish(self, path: Path, parts: Sequence[Write], step: int) -> None:
        with discarded_on_error(partial_path(path)):
            write(parts)
            finish_whole(path)
        finish_checkpoint(self.run, step, self.keep)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tells in one line of a checkpoint that could not be written."""
        try:
            yield
        except TROUBLES as error:
            raise UserError(
                f"the checkpoint of step {self._step} could not be written ({line_about(error)}); the one before it is whole: "
                f"make room and go on with `braid train --resume {self.run}`"
            ) from error
