"""One side of a comparison in a process of its own; it takes one measured turn for each line on its input.

duel:  start A, start B, ... ──▶ each prepares and warms up ──▶ A B A B A B, one turn at a time

Imports, compilation and warm-up end before the first turn. While one side runs, the others wait for a line on their
input.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Turn = Callable[[], Mapping[str, float]]


class Channel:
    """Lines to and from the measuring process; what libraries print to stdout goes to stderr."""

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._start = self._cpu = 0.0

    def send(self, message: Mapping[str, Any]) -> None:
        self._output.write(json.dumps(message) + "\n")
        self._output.flush()

    def wait_for_turn(self) -> bool:
        """Block until the next turn and start its clock. Return False if there is no further turn."""
        going = bool(sys.stdin.readline())
        self._start, self._cpu = time.perf_counter(), time.process_time()
        return going

    def report(self, found: Mapping[str, float]) -> None:
        """End the turn. `seconds` and `cpu_seconds` are measured since it began, unless the turn reports them."""
        measured = {"seconds": time.perf_counter() - self._start, "cpu_seconds": time.process_time() - self._cpu}
        self.send({**measured, **found})


def peak_mebibytes() -> float:
    """Return the process's peak resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    module, case = sys.argv[1], json.loads(sys.argv[2])
    channel = Channel()
    side = importlib.import_module(f"benchmarks.sides.{module}")
    if hasattr(side, "run"):  # A side whose library owns the loop, such as a Trainer.
        side.run(case, channel)
        return
    turn: Turn = side.prepare(case)
    channel.send({"ready": True})
    while channel.wait_for_turn():
        channel.report(turn())


if __name__ == "__main__":
    main()
