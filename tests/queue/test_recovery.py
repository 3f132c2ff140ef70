"""Processes of a queue are killed by kill -9: what they held is known to the others, counts stay exact, and what is lost has a name."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import torch

from braidrl.queue.transfer_queue import TransferQueue
from braidrl.queue.transport import QueueError

ROOT = Path(__file__).parents[2]
TASKS = {"score": ["x"], "train": ["x", "score"]}


def kill(queue: TransferQueue, name: str) -> None:
    """Kill a process of the queue, and wait until it is gone."""
    assert queue.service is not None
    (member,) = [member for member in queue.service.members if member.name == name]
    process = member.process
    os.kill(process.pid, signal.SIGKILL)
    while member.process is process:
        time.sleep(0.005)


def test_restarted_controller_leases_once_and_clients_keep_leases() -> None:
    with TransferQueue.serve({"train": ["x"]}) as queue, TransferQueue.connect(queue.address, "other") as other:
        queue.put({"x": torch.arange(8)}, rows=list(range(8)))
        mine, others = queue.get("train", 2), other.get("train", 2)
        assert mine is not None and others is not None
        kill(queue, "train")
        assert queue.done(mine) == []
        queue.finish()
        seen = [*mine.rows, *(row for batch in queue.stream("train", 3) for row in batch.rows)]
        # The rows of a late client went to a client that asked.
        late = others.rows if other.done(others) == [] else []
        assert sorted([*seen, *late]) == list(range(8))


def test_restarted_unit_restores_its_content() -> None:
    with TransferQueue.serve(TASKS, budget_bytes=1 << 20) as queue:
        queue.put({"x": torch.arange(4)}, rows=list(range(4)))
        batch = queue.get("score", 2)
        assert batch is not None and queue.done(batch, {"score": batch["x"] * 2}) == []
        before = queue.usage()
        kill(queue, "unit 0")
        assert queue.usage() == before and queue.lost() == {}
        with pytest.raises(QueueError, match="already"):
            queue.put({"x": torch.arange(1)}, rows=[0])
        queue.put({"x": torch.arange(4, 6)}, rows=[4, 5])
        queue.finish()
        for batch in iter(lambda: queue.get("score", 8), None):
            queue.done(batch, {"score": batch["x"] * 2})
        seen = {
            row: int(score) for b in queue.stream("train", 8) for row, score in zip(b.rows, b["score"], strict=True)
        }
        assert seen == {row: 2 * row for row in range(6)}


def test_repeatedly_failing_process_is_named_to_clients() -> None:
    with TransferQueue.serve({"train": ["x"]}) as queue, TransferQueue.connect(queue.address, limit_s=1.0) as other:
        assert queue.service is not None
        unit = queue.service.members[0]
        while queue.service.failure is None:
            with suppress(ProcessLookupError):
                os.kill(unit.process.pid, signal.SIGKILL)
            time.sleep(0.05)
        with pytest.raises(QueueError, match="process unit 0 is gone for the 5th time: killed by signal 9"):
            other.put({"x": torch.arange(1)}, rows=[0])


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


def test_counts_stay_exact_when_units_and_controllers_die() -> None:
    chance, done = random.Random(0), Counter[tuple[str, int]]()
    with TransferQueue.serve(TASKS, units=2) as queue, TransferQueue.connect(queue.address) as other:
        consumers = [threading.Thread(target=consume, args=(other, task, done)) for task in TASKS]
        for consumer in consumers:
            consumer.start()
        for first in range(0, 200, 10):
            queue.put({"x": torch.arange(first, first + 10)}, rows=list(range(first, first + 10)))
            if first % 50 == 30:
                kill(queue, chance.choice(["unit 0", "unit 1", "score", "train"]))
        queue.finish()
        for consumer in consumers:
            consumer.join()
    assert done == Counter({(task, row): 1 for task in TASKS for row in range(200)})


def consume(queue: TransferQueue, task: str, done: Counter[tuple[str, int]]) -> None:
    while (batch := queue.get(task, 7)) is not None:
        if not queue.done(batch, {"score": batch["x"] + 1} if task == "score" else None):
            done.update((task, row) for row in batch.rows)


@pytest.mark.soak
def test_a_hundred_kills_of_every_kind_of_process_leave_exact_counts(tmp_path: Path) -> None:
    chance, kills = random.Random(1), Counter[str]()
    with TransferQueue.serve(TASKS, lease_s=3.0, units=2) as queue:
        kinds = ["producer", "score", "train"]
        processes = {kind: program(queue.address, kind, tmp_path, 0) for kind in kinds}
        while sum(kills.values()) < 100:
            time.sleep(chance.uniform(0.1, 1.5))
            # One kill at a time: the last killed process has recovered its content from the others.
            queue.usage()
            name = chance.choice(["unit 0", "unit 1", "controller score", "controller train", *kinds])
            kills[name] += 1
            if name in kinds:
                processes[name].kill()
                processes[name].wait()
                processes[name] = program(queue.address, name, tmp_path, sum(kills.values()))
            else:
                kill(queue, name.removeprefix("controller "))
        (tmp_path / "end").touch()
        assert [process.wait(120) for process in processes.values()] == [0, 0, 0]
        assert queue.usage()["rows"] == 0
    lines = [line.split() for line in (tmp_path / "put.log").read_text().splitlines()]
    put = [first for kind, first in lines if kind == "done"]
    found = {task: [recorded(tmp_path, task, what) for what in ("begin", "done")] for task in TASKS}
    for task, first in product(TASKS, (first for kind, first in lines if kind == "begin")):
        begun, told = found[task]
        for row in range(int(first), int(first) + 8):
            unresolved = first not in put or begun[row] > told[row]
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
