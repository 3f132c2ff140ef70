"""Clients of a queue are killed by kill -9: counts stay exact, and lost payload has a name."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch

from braidrl.queue.transfer_queue import TransferQueue

ROOT = Path(__file__).parents[2]
TASKS = {"score": ["x"], "train": ["x", "score"]}


def test_lost_payload_is_named_and_put_or_computed_again() -> None:
    with TransferQueue.serve(TASKS) as queue:
        queue.put({"x": torch.arange(2)}, rows=["a", "b"])
        put = set(queue.data.segments.names())
        batch = queue.get("score", 2)
        assert batch is not None
        queue.done(batch, {"score": batch["x"] + 1})
        queue.data.segments.unlink(set(queue.data.segments.names()) - put)
        with pytest.raises(TimeoutError):
            queue.get("train", 2, wait_s=0.2)
        assert queue.lost() == {}, "what a task wrote it is asked for again"
        again = queue.get("score", 2)
        assert again is not None and again.rows == ["a", "b"]
        queue.data.segments.unlink(put)
        queue.done(again, {"score": again["x"] + 1})
        with pytest.raises(TimeoutError):
            queue.get("train", 2, wait_s=0.2)
        assert queue.lost() == {"a": ["x"], "b": ["x"]}
        queue.put({"x": torch.arange(2)}, rows=["a", "b"])
        last = queue.get("train", 2)
        assert last is not None and last["score"].tolist() == [1, 2] and queue.lost() == {}


@pytest.mark.soak
def test_a_hundred_kills_of_producers_and_consumers_leave_exact_counts(tmp_path: Path) -> None:
    chance, kills = random.Random(1), Counter[str]()
    with TransferQueue.serve(TASKS, lease_s=3.0) as queue:
        kinds = ["producer", "score", "train"]
        processes = {kind: program(queue.address, kind, tmp_path, 0) for kind in kinds}
        while sum(kills.values()) < 100:
            time.sleep(chance.uniform(0.1, 1.5))
            kills[name := chance.choice(kinds)] += 1
            processes[name].kill()
            processes[name].wait()
            processes[name] = program(queue.address, name, tmp_path, sum(kills.values()))
        (tmp_path / "end").touch()
        assert [process.wait(120) for process in processes.values()] == [0, 0, 0]
        assert queue.usage()["rows"] == 0
    lines = [line.split() for line in (tmp_path / "put.log").read_text().splitlines()]
    put = [first for kind, first in lines if kind == "done"]
    result = {task: [recorded(tmp_path, task, what) for what in ("begin", "done")] for task in TASKS}
    for task, first in product(TASKS, (first for kind, first in lines if kind == "begin")):
        started, told = result[task]
        for row in range(int(first), int(first) + 8):
            unresolved = first not in put or started[row] > told[row]
            assert told[row] == 1 or (unresolved and told[row] == 0), f"{task}, row {row}: done {told[row]} times"
    print(f"{8 * len(put)} rows, kills: {dict(kills)}")


def recorded(folder: Path, task: str, what: str) -> Counter[int]:
    lines = [line.split() for path in folder.glob(f"{task}.*.log") for line in path.read_text().splitlines()]
    return Counter(int(row) for kind, *rows in lines if kind == what for row in rows)


def program(address: str, kind: str, folder: Path, number: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.queue.test_recovery", address, kind, str(folder), str(number)], cwd=ROOT
    )


def main(address: str, kind: str, folder: Path, number: str) -> None:
    """A producer, or a consumer that writes down what it is about to be done with and what it was told is done."""
    with TransferQueue.connect(address) as queue:
        if kind == "producer":
            produce(queue, folder)
            return
        with (folder / f"{kind}.{number}.log").open("a", buffering=1) as log:
            while (batch := queue.get(kind, 8)) is not None:
                rows = " ".join(map(str, batch.rows))
                log.write(f"begin {rows}\n")
                if not queue.done(batch, {"score": batch["x"] + 1} if kind == "score" else None):
                    log.write(f"done {rows}\n")


def produce(queue: TransferQueue, folder: Path) -> None:
    """Resume after the rows of the last put, which may or may not have been stored."""
    log = folder / "put.log"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    first = 8 * sum(kind == "begin" for kind, _ in lines)
    with log.open("a", buffering=1) as out:
        while not (folder / "end").exists():
            out.write(f"begin {first}\n")
            queue.put({"x": torch.arange(first, first + 8)}, rows=list(range(first, first + 8)))
            out.write(f"done {first}\n")
            first += 8
            time.sleep(0.02)
    queue.finish()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
