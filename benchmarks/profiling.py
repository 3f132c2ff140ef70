"""Where one turn of a side spends its time: `python -m benchmarks.profiling MODULE CASE`."""

from __future__ import annotations

import cProfile
import importlib
import json
import pstats
import sys

from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

OPERATORS = 20


def main() -> None:
    module, case = sys.argv[1], json.loads(sys.argv[2])
    side = importlib.import_module(f"benchmarks.sides.{module}")
    if hasattr(side, "run"):
        print("spends its time in several processes, which this does not look into")
        return
    turn = side.prepare(case)
    with torch_profile(activities=[ProfilerActivity.CPU]) as operators:
        turn()
    print(operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=OPERATORS, max_name_column_width=44))
    functions = cProfile.Profile()
    functions.runcall(turn)
    # compiled kernels are no operators of torch: they show here, under the functions that call them
    pstats.Stats(functions).sort_stats("tottime").print_stats(OPERATORS)


if __name__ == "__main__":
    main()
