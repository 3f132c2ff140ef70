"""One side of a comparison as a process of its own, which takes one measured turn whenever it is told to.

duel:  start A, start B, ... ──▶ each prepares and warms up ──▶ A B A B A B, one turn at a time

Imports, compilation and warm-up are over before the first turn; while one side runs, the others wait for a line on their input.
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
    """Lines to and from the process that measures; what libraries print to standard output goes to standard error."""

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._start = self._cpu = 0.0

    def send(self, message: Mapping[str, Any]) -> None:
        self._output.write(json.dumps(message) + "\n")
        self._output.flush()

    def wait_for_turn(self) -> bool:
        """Blocks until the next turn, and starts its clock; False when there is none."""
        going = bool(sys.stdin.readline())
        self._start, self._cpu = time.perf_counter(), time.process_time()
        return going

    def report(self, found: Mapping[str, float]) -> None:
        """Ends the turn. `seconds` and `cpu_seconds` are those since it began, where the turn did not measure itself."""
        measured = {"seconds": time.perf_counter() - self._start, "cpu_seconds": time.process_time() - self._cpu}
        self.send({**measured, **found})


def peak_mebibytes() -> float:
    """The process's greatest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    module, case = sys.argv[1], json.loads(sys.argv[2])
    channel = Channel()
    side = importlib.import_module(f"benchmarks.sides.{module}")
    if hasattr(side, "run"):  # a side whose loop is a library's own, such as a Trainer
        side.run(case, channel)
        return
    turn: Turn = side.prepare(case)
    channel.send({"ready": True})
    while channel.wait_for_turn():
        channel.report(turn())


if __name__ == "__main__":
    main()
