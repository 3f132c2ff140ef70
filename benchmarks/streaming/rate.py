"""Rows per second from admission to the optimizer step, with an engine that answers at once, for two versions in one
run.

    python -m benchmarks.streaming.rate [--against COMMIT] [--rows 8192] [--lease 2048] [--staleness 0] [--turns 2]

commit ──git archive─▶ build/rate ─at_once─▶ rows per second, CPU seconds of each process ─┐
working tree ─────────────────────at_once─▶ rows per second, CPU seconds of each process ─┴▶ in turn; medians; ratio

The model has one layer of width 8, a prompt and a response have one token each, and the loss is zero: what remains is
the cost of passing rows on. The first iteration is left out, because processes import and warm up in it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.streaming import at_once
from benchmarks.streaming.at_once import SAMPLES, AtOnce, passed
from braidrl.data.messages import pack_message, unpack_message
from braidrl.data.rows import Objects, Rows
from braidrl.flow.batches import Sizes
from braidrl.queue.calls import Done, Hello
from braidrl.queue.client import write_columns
from braidrl.queue.owner import StorageNode
from braidrl.queue.table import Block, StoredRows
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.stream import Stream
from braidrl.runtimes.streaming.work import LeasedRows, Step, Stepped, TakeWork, WorkerRequest

ROOT, RUN = Path(__file__).resolve().parents[2], Path(at_once.__file__).resolve()
ENGINE, TRAINER = "actor.generate.0.0", "actor.0.0"


class TimedControl:
    """A control plane without sockets, asked by an engine and a trainer that compute nothing; counts its CPU
    seconds.
    """

    def __init__(self, node: StorageNode, rows: int, lease: int) -> None:
        """Admit all rows of one iteration."""
        self.rows, self.most, self.spent, self.leases = rows, lease, 0.0, list[tuple[int, int]]()
        self.block = Block("here", node.data.address, "braid-0-nothing-0", 8)
        self.control = ControlPlane(Stream(passed(), Sizes(1, rows // SAMPLES, SAMPLES, rows)), node.data, 600.0)
        for holder in (ENGINE, TRAINER):
            self.ask(Hello(node.data.address, holder == ENGINE), holder)
        self.control.steps.allow(1)
        self.timed(lambda: self.control.training.schedule.admission.groups_wanted(0))
        numbers = torch.arange(rows)
        columns: dict[str, Any] = {
            "source": torch.zeros(rows, dtype=torch.int64),
            "group": numbers // SAMPLES,
            "sample": numbers % SAMPLES,
            "prompt_length": torch.full((rows,), 4),
            "metadata": Objects(({},) * rows),
        }
        admitted = write_columns(node.data, columns)
        self.timed(lambda: self.control.admit(self.control.training, admitted))

    def timed(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call; add its CPU seconds to `spent`."""
        start = time.thread_time()
        found = call()
        self.spent += time.thread_time() - start
        return found

    def ask(self, request: Any, holder: str, frames: Any = ()) -> Any:
        """Return the answer to a request as it arrives from a socket; None if the holder must wait."""
        request.holder = holder
        message = pack_message(request)
        answer = self.timed(lambda: self.control.handle(unpack_message(message, WorkerRequest), frames))
        return None if answer is None else answer[0]

    def done(self, holder: str, consumer: str, done: Any, written: tuple[dict[str, Any], int, list[str], Any]) -> None:
        """Report leases as done, with the columns written for their rows."""
        columns, count, payload, rows = written
        frames: list[Any] = []
        index = Rows({name: make(count, dtype=torch.int64) for name, make in columns.items()})
        part = StoredRows.of_block(index, self.block, payload, count).message(frames)
        self.ask(Done(consumer, done, [(part, rows)]), holder, [bytes(frame) for frame in frames])

    def generate(self) -> None:
        """Take rows as an engine, and return them."""
        work = self.ask(TakeWork(["actor.generate"], self.most, slots=AtOnce.slots), ENGINE)
        if isinstance(work, LeasedRows):
            done = [(work.lease, list(range(work.size)))]
            drawn = {"version": torch.zeros, "length": torch.ones, "score": torch.ones}
            self.done(ENGINE, "actor.generate", done, (drawn, work.size, ["tokens"], done))

    def train(self) -> None:
        """Take rows as a trainer; after the last ones, step and report the batch."""
        ready = ["actor.update"] if sum(size for _, size in self.leases) == self.rows else []
        work = self.ask(TakeWork(["train.actor"], self.most, role="actor", ready=ready), TRAINER)
        if isinstance(work, LeasedRows):
            self.leases.append((work.lease, work.size))
        elif isinstance(work, Step):
            report = {"sums": {}, "stage": "actor.update", "seconds": 0.0}
            self.ask(Stepped("actor.update", report), TRAINER)
            whole = [(lease, list(range(size))) for lease, size in self.leases]
            computed = {"advantage": torch.ones}
            self.done(
                TRAINER, "train.actor", [(lease, None) for lease, _ in self.leases], (computed, self.rows, [], whole)
            )


def control_cost(rows: int, lease: int) -> float:
    """Return the microseconds of CPU that the control plane needs per row; the trainer's last step publishes the
    version.
    """
    node = StorageNode("here", "127.0.0.1")
    try:
        timed = TimedControl(node, rows, lease)
        while not timed.control.finished:
            timed.generate()
            timed.train()
        return timed.spent / rows * 1e6
    finally:
        node.close()


def tree_of(commit: str) -> Path:
    """Return a folder with the package of a commit."""
    tree = ROOT / "build" / "rate"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", commit, "braidrl"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", str(tree)], input=archive.stdout, check=True)
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="a commit to measure beside the working tree")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--lease", type=int, default=2048, help="the most rows of a lease, and of a pass of the model")
    parser.add_argument(
        "--staleness", type=int, default=0, help="trainer.max_staleness; above 0 no engine waits for weights"
    )
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    trees = ({"before": tree_of(arguments.against)} if arguments.against else {}) | {"now": ROOT}
    from transformers import AutoModelForCausalLM, Qwen3Config

    from tests.tiny import SIZES, TOKENIZER, write_jsonl

    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES | small, head_dim=8))

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory(prefix="braid-rate-") as folder:
        model.save_pretrained(Path(folder) / "model")
        TOKENIZER.save_pretrained(Path(folder) / "model")
        prompts = [{"prompt": str(n % 10), "answer": "0"} for n in range(arguments.rows // SAMPLES)]
        write_jsonl(Path(folder) / "train.jsonl", prompts)
        for _ in range(arguments.turns):
            for name, tree in trees.items():
                numbers = map(str, (arguments.rows, arguments.lease, arguments.staleness))
                command = [sys.executable, str(RUN), folder, *numbers]
                environment = os.environ | {"PYTHONPATH": str(tree)}
                done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(done.stderr)
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
                print(name, json.dumps(found[name][-1]), flush=True)
    middle = {
        name: {
            key: statistics.median(turn[key] for turn in turns)
            for key, value in turns[0].items()
            if isinstance(value, float)
        }
        for name, turns in found.items()
    }
    if arguments.against:
        middle["times"] = {
            key: round(middle["now"][key] / middle["before"][key], 2)
            for key in ("rows_per_second", "main_cpu_us_per_row", "all_cpu_us_per_row")
        }
    middle["now"]["control_us_per_row"] = control_cost(arguments.rows, arguments.lease)
    print(json.dumps(middle, indent=1))


if __name__ == "__main__":
    main()
