"""One measured run: an engine that answers at once, its flow, and rows per second; under this version of the code or an
earlier one.

    python benchmarks/streaming/at_once.py FOLDER ROWS LEASE STALENESS

FOLDER has `model` and `train.jsonl`. The result is printed as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import braidrl
from braidrl.algorithms.registry import advantages, losses
from braidrl.data.rows import FinishReason
from braidrl.flow import Flow, actor, advantage, loss

FILE = Path(__file__).resolve()
SAMPLES, STEPS = 8, 5
# The places of engines and models in earlier versions of the code. An installed package would answer to `find_spec`.
PACKAGE = Path(braidrl.__file__).parent
ENGINES, MODELS = ("engines", "training") if (PACKAGE / "engines").is_dir() else ("rollout", "models")
STEPPING = "stepping" if (PACKAGE / ENGINES / "stepping.py").is_file() else "embedded.stepping"
SteppingEngine: Any = import_module(f"braidrl.{ENGINES}.{STEPPING}").SteppingEngine
Response: Any = import_module(f"braidrl.{ENGINES}.requests").Response
load_tokenizer: Any = import_module(f"braidrl.{MODELS}.loading").load_tokenizer


class AtOnce(SteppingEngine):
    """Engine that ends each row with one token, one step after it was accepted."""

    slots = 2048

    def __init__(self, spec: Any) -> None:
        super().__init__(load_tokenizer(spec.model), (), spec.max_sequence_tokens, spec.seed)
        self.rows: dict[Any, Any] = {}

    @property
    def in_flight(self) -> int:
        return len(self.rows)

    @property
    def waiting(self) -> int:
        return 0

    def publish(self, version: int, source: Any = None) -> None:
        self.version = version

    def _accept(self, row: Any) -> None:
        self.rows[row.request.uid] = row

    def step(self) -> list[Any]:
        found, self.rows = self.rows, {}
        return self._done([self._answer(uid, FinishReason.STOP) for uid in found])

    def abort(self, uid: Any) -> Any:
        del self.rows[uid]
        return self._done([self._answer(uid, FinishReason.ABORT)])[0]

    def clear(self, release: bool = True) -> None:
        self.rows = {}
        self._under_way.clear()

    def _answer(self, uid: Any, reason: Any) -> Any:
        """Return a row's response, with the same token for each."""
        token, log_probs, versions = torch.full((1,), 5), torch.zeros(1), torch.full((1,), self.version)
        if not hasattr(Response, "log_probs"):  # of a version before columns per token were registered
            return Response(uid, token, log_probs, reason, versions)
        return Response(uid, token, reason, {"rollout_log_probs": log_probs, "rollout_versions": versions})


@advantages.register(writes=["score"])
def graded(length: Tensor) -> Tensor:
    """Return a score for each row, (B,)."""
    return length.double()


@advantages.register(writes=["advantage"], scope="group")
def within_groups(score: Tensor, group: Tensor) -> Tensor:
    """Return scores (B,) unchanged, once all rows of a `group` (B,) are there."""
    return score


@losses.register()
def nothing(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return 0 for each token, (N,)."""
    return 0.0 * log_probs * advantages, {}


def passed() -> Flow:
    """Return the flow: generate, score, compare within groups, train."""
    return Flow(
        "passed",
        [actor.generate(), advantage.graded(), advantage.within_groups(), actor.update(loss=loss.nothing())],
    )


def settings(folder: Path, rows: int, lease: int, staleness: int) -> dict[str, Any]:
    """Return the configuration of a run with `rows` rows in a batch, and at most `lease` rows in a lease."""
    return {
        "flow": f"{FILE}:passed",
        "model": str(folder / "model"),
        "output": str(folder),
        "name": "rate",
        "threads": 1,
        "device": "cpu",
        "data": {"train": str(folder / "train.jsonl")},
        "runtime": "streaming",
        "rollout": {
            "engine": f"{FILE}:AtOnce",
            "slots": AtOnce.slots,
            "samples_per_prompt": SAMPLES,
            "max_response_tokens": 4,
            "max_log_prob_gap": 1e3,
        },
        "trainer": {
            "steps": STEPS,
            "prompts_per_step": rows // SAMPLES,
            "checkpoint_every": 0,
            "max_tokens_per_device": 16384,
            "max_staleness": staleness,
        },
        "streaming": {"dispatch_rows": lease},
        "evaluation": {"every": 0},
        "trackers": [],
    }


def cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds of this process and of its descendants, by process number."""
    found, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # It has ended since the listing.
        parents[folder.name] = fields[1]
        found[folder.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    own = {str(os.getpid())}
    while more := {number for number, parent in parents.items() if parent in own} - own:
        own |= more
    return {number: found[number] for number in own}


def measured(folder: Path, rows: int, lease: int, staleness: int) -> dict[str, Any]:
    """Run, and return rows per second and CPU microseconds per row, of the main program and of each process, after the
    first iteration.
    """
    from braidrl.config import parse_config
    from braidrl.runtimes.run import TrainingRun

    moments: list[tuple[float, dict[str, float]]] = []
    with TrainingRun(parse_config(settings(folder, rows, lease, staleness))) as run:

        def watch() -> None:
            file = run.folder / "metrics.jsonl"
            while len(moments) < STEPS:
                if file.is_file() and len(file.read_bytes().splitlines()) > len(moments):
                    moments.append((time.monotonic(), cpu_seconds()))
                time.sleep(0.005)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        run.train()
        watcher.join()
        counted = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])
    (start, before), (end, after) = moments[0], moments[-1]
    passed_rows = (STEPS - 1) * rows
    spent = {number: (seconds - before.get(number, 0.0)) / passed_rows * 1e6 for number, seconds in after.items()}
    main = spent.pop(str(os.getpid()))
    return {
        "rows_per_second": passed_rows / (end - start),
        "main_cpu_us_per_row": main,
        "all_cpu_us_per_row": main + sum(spent.values()),
        "others": sorted((round(one, 1) for one in spent.values() if one > 0.5), reverse=True),
        **{name: value for name, value in counted.items() if name.startswith("streaming/main_payload")},
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="braid-rate-") as own:
        for name in ("model", "train.jsonl"):
            (Path(own) / name).symlink_to(Path(sys.argv[1]) / name)
        print(json.dumps(measured(Path(own), *map(int, sys.argv[2:]))), flush=True)
