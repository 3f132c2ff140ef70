"""Rows per second from admission to the optimizer step, with an engine that answers at once, for two versions in one run.

    python -m benchmarks.streaming.rate [--against COMMIT] [--rows 8192] [--turns 2]

commit ──git archive──▶ build/rate ──run──▶ rows per second, CPU seconds of the main program ──┐
working tree ───────────────────────run──▶ rows per second, CPU seconds of the main program ──┴▶ in turn; medians; how many times

The loss costs almost nothing beside the passes of a tiny model, so that what remains is the cost of passing rows on. The first
iteration is left out, because processes import and warm up in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidrl.algorithms.registry import advantages, losses
from braidrl.data.codec import encode
from braidrl.data.messages import pack_message, unpack_message
from braidrl.data.rows import FinishReason, Objects, Rows
from braidrl.engines.engine import EngineSpec
from braidrl.engines.requests import Response, Uid
from braidrl.engines.stepping import SteppingEngine
from braidrl.flow import Flow, actor, advantage, loss
from braidrl.flow.batches import Sizes
from braidrl.queue.owner import StorageNode
from braidrl.queue.table import Block
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.rows import stored
from braidrl.runtimes.streaming.stream import Stream
from braidrl.training.loading import load_tokenizer

FILE, ROOT = Path(__file__).resolve(), Path(__file__).resolve().parents[2]
SAMPLES, STEPS = 8, 3
ENGINE, TRAINER = "actor.generate.0.0", "actor.0.0"


class AtOnce(SteppingEngine):
    """Engine that ends each row with one token, one step after it was accepted."""

    slots = 1024

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(load_tokenizer(spec.model), (), spec.max_sequence_tokens, spec.seed)
        self.rows: dict[Uid, Any] = {}

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

    def step(self) -> list[Response]:
        found, self.rows = self.rows, {}
        return self._done([self._response(uid, FinishReason.STOP) for uid in found])

    def abort(self, uid: Uid) -> Response:
        del self.rows[uid]
        return self._done([self._response(uid, FinishReason.ABORT)])[0]

    def clear(self, release: bool = True) -> None:
        self.rows = {}
        self._under_way.clear()

    def _response(self, uid: Uid, reason: FinishReason) -> Response:
        versions = torch.full((1,), self.version, dtype=torch.int64)
        return Response(uid, torch.full((1,), 5), torch.zeros(1), reason, versions)


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


def settings(folder: Path, rows: int) -> dict[str, Any]:
    """Return the configuration of a run with `rows` rows in flight."""
    return {
        "flow": f"{FILE}:passed", "model": str(folder / "model"), "output": str(folder), "name": "rate",
        "threads": 1, "device": "cpu", "data": {"train": str(folder / "train.jsonl")}, "runtime": "streaming",
        "rollout": {
            "engine": f"{FILE}:AtOnce", "slots": AtOnce.slots, "samples_per_prompt": SAMPLES, "max_response_tokens": 4,
            "max_log_prob_gap": 1e3,
        },
        "trainer": {
            "steps": STEPS, "prompts_per_step": rows // SAMPLES, "checkpoint_every": 0, "max_tokens_per_device": 16384,
        },
        "streaming": {"dispatch_rows": 64}, "evaluation": {"every": 0}, "trackers": [],
    }  # fmt: skip


class TimedControl:
    """A control plane without sockets, asked by an engine and a trainer that compute nothing; counts its CPU seconds."""

    def __init__(self, node: StorageNode, rows: int) -> None:
        """Admit all rows of one iteration."""
        self.rows, self.spent, self.leases = rows, 0.0, list[list[Any]]()
        self.block = Block("here", node.data.address, "braid-0-nothing-0", 8)
        self.control = ControlPlane(Stream(passed(), Sizes(1, rows // SAMPLES, SAMPLES, rows)), node.data, 600.0)
        for holder in (ENGINE, TRAINER):
            self.ask("hello", holder, address=node.data.address, generates=holder == ENGINE)
        self.control.allow(1)
        self.timed(lambda: self.control.training.schedule.groups_wanted(0))
        numbers = torch.arange(rows)
        columns: dict[str, Any] = {
            "source": torch.zeros(rows, dtype=torch.int64), "group": numbers // SAMPLES, "sample": numbers % SAMPLES,
            "prompt_length": torch.full((rows,), 4), "metadata": Objects(({},) * rows),
        }  # fmt: skip
        admitted = stored(node.data, Rows(columns))
        self.timed(lambda: self.control.admit(self.control.training, admitted))

    def timed(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call; add its CPU seconds to `spent`."""
        start = time.thread_time()
        found = call()
        self.spent += time.thread_time() - start
        return found

    def ask(self, request: str, holder: str, frames: Any = (), **fields: Any) -> dict[str, Any]:
        """Return the answer to a request as it arrives from a socket; empty if the holder must wait."""
        message = pack_message({"request": request, "holder": holder, "held": [], **fields})
        answer = self.timed(lambda: self.control.handle(unpack_message(message), frames))
        return {} if answer is None else answer[0]

    def done(self, holder: str, consumer: str, done: Any, written: tuple[dict[str, Any], int, list[str], Any]) -> None:
        """Report leases as done, with the columns written for their rows."""
        columns, count, payload, rows = written
        frames = encode(Rows({name: make(count, dtype=torch.int64) for name, make in columns.items()}))
        part = {"block": self.block, "columns": payload, "frames": [0, len(frames)], "size": count, "rows": rows}
        self.ask(
            "done", holder, [bytes(frame) for frame in frames], consumer=consumer, done=done, parts=[part], totals={},
            reports=[], unfinished=False,
        )  # fmt: skip

    def generate(self) -> None:
        """Take up to 64 rows as an engine, and return them."""
        work = self.ask("take", ENGINE, consumers=["actor.generate"], most=64, ranks=1, slots=AtOnce.slots)
        if work.get("kind") == "rows":
            done = [[work["lease"], list(range(work["size"]))]]
            drawn = {"version": torch.zeros, "length": torch.ones, "score": torch.ones}
            self.done(ENGINE, "actor.generate", done, (drawn, work["size"], ["tokens"], done))

    def train(self) -> None:
        """Take up to 64 rows as a trainer; after the last ones, step and report the batch."""
        ready = ["actor.update"] if sum(size for _, size in self.leases) == self.rows else []
        work = self.ask("take", TRAINER, consumers=["train.actor"], most=64, ranks=1, role="actor", ready=ready)
        if work.get("kind") == "rows":
            self.leases.append([work["lease"], work["size"]])
        elif work.get("kind") == "step":
            report = {"sums": {}, "stage": "actor.update", "seconds": 0.0}
            self.ask("stepped", TRAINER, stage="actor.update", report=report)
            whole = [[lease, list(range(size))] for lease, size in self.leases]
            computed = {"advantage": torch.ones}
            self.done(
                TRAINER, "train.actor", [[lease, None] for lease, _ in self.leases], (computed, self.rows, [], whole)
            )


def control_cost(rows: int) -> float:
    """Return the microseconds of CPU that the control plane needs per row; the trainer's last step publishes the version."""
    node = StorageNode("here", "127.0.0.1")
    try:
        timed = TimedControl(node, rows)
        while not timed.control.finished:
            timed.generate()
            timed.train()
        return timed.spent / rows * 1e6
    finally:
        node.close()


def measured(folder: Path, rows: int) -> dict[str, float]:
    """Run, and return rows per second and the main program's CPU microseconds per row, after the first iteration."""
    from braidrl.config import parse_config
    from braidrl.runtimes.run import TrainingRun

    moments: list[tuple[float, float]] = []
    with TrainingRun(parse_config(settings(folder, rows))) as run:

        def watch() -> None:
            file = run.folder / "metrics.jsonl"
            while len(moments) < STEPS:
                lines = len(file.read_bytes().splitlines()) if file.is_file() else 0
                moments.extend([(time.monotonic(), time.process_time())] * (lines - len(moments)))
                time.sleep(0.005)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        run.train()
        watcher.join()
        counted = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])
    (start, busy), (end, busy_then) = moments[0], moments[-1]
    passed_rows = (STEPS - 1) * rows
    return {
        "rows_per_second": passed_rows / (end - start),
        "main_cpu_us_per_row": (busy_then - busy) / passed_rows * 1e6,
        **{name: value for name, value in counted.items() if name.startswith("streaming/payload")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="a commit to measure beside the working tree")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--in", dest="folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        with tempfile.TemporaryDirectory(prefix="braid-rate-") as own:
            for name in ("model", "train.jsonl"):
                (Path(own) / name).symlink_to(Path(arguments.folder) / name)
            print(json.dumps(measured(Path(own), arguments.rows)), flush=True)
        return
    trees = {"now": ROOT}
    if arguments.against:
        trees = {"before": ROOT / "build" / "rate"} | trees
        trees["before"].mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(
            ["git", "archive", arguments.against, "braidrl"], cwd=ROOT, capture_output=True, check=True
        )
        subprocess.run(["tar", "x", "-C", str(trees["before"])], input=archive.stdout, check=True)
    from tests.tiny import write_jsonl, write_model

    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory(prefix="braid-rate-") as folder:
        write_model(Path(folder) / "model")
        prompts = [{"prompt": f"{n % 97}+{n // 97}=", "answer": "0"} for n in range(arguments.rows // SAMPLES)]
        write_jsonl(Path(folder) / "train.jsonl", prompts)
        for _ in range(arguments.turns):
            for name, tree in trees.items():
                command = [sys.executable, str(FILE), "--in", folder, "--rows", str(arguments.rows)]
                environment = os.environ | {"PYTHONPATH": str(tree)}
                done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(done.stderr)
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
                print(name, json.dumps(found[name][-1]), flush=True)
    middle = {
        name: {key: statistics.median(turn[key] for turn in turns) for key in turns[0]} for name, turns in found.items()
    }
    if arguments.against:
        middle["times"] = {
            key: round(middle["now"][key] / middle["before"][key], 2)
            for key in ("rows_per_second", "main_cpu_us_per_row")
        }  # fmt: skip
    middle["now"]["control_us_per_row"] = control_cost(arguments.rows)
    print(json.dumps(middle, indent=1))


if __name__ == "__main__":
    main()
