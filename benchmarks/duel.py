"""Run several sides of one case in turn, A B A B, and return what each did per second.

Every side is a separate process, started before the first turn; see `turns.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import IO, Any

OURS = Path(".venv/bin/python")
PEERS = Path("build/bench-venv/bin/python")


@dataclass(frozen=True)
class Side:
    """A module of `benchmarks.sides` that runs a case. Its speed is the `tokens` of a turn over its seconds."""

    name: str
    module: str
    case: Mapping[str, Any]

    @property
    def python(self) -> Path:
        return OURS if self.module.endswith("_braid") else PEERS


class Opponent:
    """A side's process."""

    def __init__(self, side: Side, threads: int) -> None:
        self.side = side
        count = str(threads)
        environment = {
            **os.environ,
            "PYTHONPATH": ".",
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TQ_NUM_THREADS": count,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._errors: IO[bytes] = TemporaryFile()  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [str(side.python), "-m", "benchmarks.turns", side.module, json.dumps({**side.case, "threads": threads})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def hear(self) -> dict[str, float]:
        """Return the next line of the process. Raises RuntimeError with the end of its stderr if it died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self.side.name} died: ...{self._errors.read().decode(errors='replace')[-2000:]}")
        heard: dict[str, float] = json.loads(line)
        return heard

    def turn(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def duel(sides: list[Side], rounds: int, threads: int) -> dict[str, dict[str, Any]]:
    """Return the medians and all turns of each side."""
    opponents: list[Opponent] = []
    turns: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    try:
        for side in sides:  # One after the other, so that a warm-up does not disturb another one.
            opponents.append(Opponent(side, threads))
            opponents[-1].hear()
        for _ in range(rounds):
            for opponent in opponents:
                turns[opponent.side.name].append(opponent.turn())
    finally:
        for opponent in opponents:
            opponent.close()
    return {name: {**medians(found), "turns": found} for name, found in turns.items()}


def medians(turns: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of every number that the turns report, and tokens per second of wall-clock and of CPU time."""
    found = {name: median(turn[name] for turn in turns) for name in turns[0]}
    if "tokens" in found:
        found["tokens_per_second"] = median(turn["tokens"] / turn["seconds"] for turn in turns)
        if "images" in found:
            found["images_per_second"] = median(turn["images"] / turn["seconds"] for turn in turns)
        found["tokens_per_cpu_second"] = median(turn["tokens"] / turn["cpu_seconds"] for turn in turns)
    return found
