"""Profile one turn of a side: `python -m benchmarks.profiling MODULE CASE`."""

from __future__ import annotations

import cProfile
import importlib
import json
import pstats
import sys
from collections.abc import Mapping
from typing import Any

from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.turns import Channel

OPERATORS = 20


class ProfiledTurn(Channel):
    """Channel for a side whose library owns the loop; it profiles the first turn instead of measuring.

    If a side has several processes, only the controlling one is profiled.
    """

    def __init__(self) -> None:
        self._operators: torch_profile | None = None

    def send(self, message: Mapping[str, Any]) -> None:
        """Ignore the message: no process is waiting for it."""

    def wait_for_turn(self) -> bool:
        if self._operators is None:
            self._operators = torch_profile(activities=[ProfilerActivity.CPU])
            self._operators.__enter__()
            self._start = self._cpu = 0.0
            return True
        self._operators.__exit__(None, None, None)
        show(self._operators)
        return False


def main() -> None:
    module, case = sys.argv[1], json.loads(sys.argv[2])
    side = importlib.import_module(f"benchmarks.sides.{module}")
    if hasattr(side, "run"):
        side.run(case, ProfiledTurn())
        return
    turn = side.prepare(case)
    turn()  # From here on the peak is the memory that the turn itself needs.
    with torch_profile(activities=[ProfilerActivity.CPU]) as operators:
        turn()
    show(operators)
    functions = cProfile.Profile()
    functions.runcall(turn)
    # Compiled kernels are not torch operators: they show up here, under the functions that call them.
    pstats.Stats(functions).sort_stats("tottime").print_stats(OPERATORS)


def show(operators: torch_profile) -> None:
    """Print torch's operators by their own time."""
    print(operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=OPERATORS, max_name_column_width=44))


if __name__ == "__main__":
    main()
