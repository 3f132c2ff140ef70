"""A user-defined transfer protocol and worker methods: the surprise of each response to the trained model.

roles:
  actor: {methods: examples/own_protocol/methods.py:Surprise}
"""

from __future__ import annotations

import os
from typing import Any

from braidrl.data.rows import Column, Rows
from braidrl.runtimes.hybrid.protocols import DivisibleTable, Mesh, RankCalls, TransferProtocol, register
from braidrl.training.roles.worker import RoleWorker


def in_turn(mesh: Mesh, rows: DivisibleTable, *arguments: Any) -> RankCalls:
    """Give row i to worker i modulo the number of workers, so that the rows of a group go to different workers."""
    return [(rows.take(range(rank, len(rows), mesh.size)), *arguments) for rank in range(mesh.size)]


def back_in_turn(mesh: Mesh, calls: RankCalls, results: list[Any]) -> Any:
    """Join the workers' rows in their original order."""
    joined = results[0].cat(results)
    place = {row: i for i, row in enumerate(sorted(range(len(joined)), key=lambda row: row % mesh.size))}
    return joined.take([place[row] for row in range(len(joined))])


IN_TURN = TransferProtocol("IN_TURN", in_turn, back_in_turn)


class Surprise:
    """Methods added to each of the actor's workers."""

    def __init__(self, worker: RoleWorker) -> None:
        self.worker = worker

    @register(protocol=IN_TURN, reads=("tokens", "action_mask", "sequence_lengths"), writes=("surprise",))
    def surprise(self, rows: Rows, scale: float) -> dict[str, Column]:
        """Return the mean of -scale * log-probability over each row's action tokens (B,)."""
        return {"surprise": -scale * self.worker.forward("log_probs", rows).row_means()}

    @register(protocol="ONE_TO_ALL")
    def process_id(self) -> int:
        """Return the id of this worker's process."""
        return os.getpid()
