"""The transfer queue by itself: columns from anybody in any order, rows to each task once, and memory within its
budget.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from braidrl.queue.storage import Segments
from braidrl.queue.transfer_queue import QueueFull, TransferQueue
from braidrl.queue.transport import QueueError

ROOT = Path(__file__).parents[2]


def segments(queue: TransferQueue) -> list[str]:
    return Segments(queue.data.segments.run, "looker").names()


def test_row_is_ready_after_last_column_from_any_writer() -> None:
    with TransferQueue.serve({"train": ["tokens", "reward"]}) as queue, TransferQueue.connect(queue.address) as other:
        queue.put({"tokens": [torch.arange(3), torch.arange(5)]}, rows=["a", "b"])
        with pytest.raises(TimeoutError, match="task train"):
            other.get("train", 8, wait_s=0.05)
        other.put({"reward": np.array([0.5, 1.5], dtype=np.float32)}, rows=["b", "a"])
        batch = other.get("train", 8)
        assert batch is not None and batch.rows == ["a", "b"]
        assert [row.tolist() for row in batch.torch()["tokens"]] == [[0, 1, 2], [0, 1, 2, 3, 4]]
        assert batch.numpy()["reward"].tolist() == [1.5, 0.5]
        assert other.done(batch) == [] and segments(queue) == [], "rows that every task is done with leave"


def test_tasks_get_rows_once_and_feed_each_other() -> None:
    with TransferQueue.serve({"score": ["x"], "train": ["x", "score"]}) as queue:
        queue.put({"x": torch.arange(10)}, rows=list(range(10)))
        queue.finish()
        for batch in iter(lambda: queue.get("score", 3), None):
            queue.done(batch, {"score": batch["x"] * 2})
        seen = {}
        for batch in queue.stream("train", 4):
            seen.update(zip(batch.rows, batch["score"].tolist(), strict=True))
        assert seen == {row: 2 * row for row in range(10)}
        assert queue.usage()["bytes"] == 0 and segments(queue) == []


def test_tensordict_goes_in_and_out_with_rows_of_any_length() -> None:
    pytest.importorskip("tensordict")
    with TransferQueue.serve({"train": ["tokens", "mask", "text"]}) as queue:
        tokens = torch.nested.nested_tensor([torch.arange(2), torch.arange(4)], layout=torch.jagged)
        queue.put(TensorDict({"tokens": tokens, "mask": torch.eye(2, dtype=torch.bool)}, [2]), rows=[0, 1])
        queue.put({"text": ["one", {"two": 2}]}, rows=[0, 1])
        batch = queue.get("train", 2)
        assert batch is not None and batch["text"] == ["one", {"two": 2}]
        result = batch.tensordict()
        assert result.batch_size == torch.Size([2]) and torch.equal(result["mask"], torch.eye(2, dtype=torch.bool))
        assert [row.tolist() for row in result["tokens"].unbind()] == [[0, 1], [0, 1, 2, 3]]


def test_rows_are_taken_table_by_table_and_by_a_tables_name() -> None:
    with TransferQueue.serve({"train": ["x"]}) as queue:
        queue.put({"x": torch.zeros(2)}, rows=[3, 4], table=2)
        queue.put({"x": torch.zeros(2)}, rows=[1, 2], table=1)
        first, second = queue.get("train", 8), queue.get("train", 8, table=2)
        assert first is not None and second is not None and (first.rows, second.rows) == ([1, 2], [3, 4])
        queue.clear(table=2)
        assert queue.done(second) == second.leases, "what was cleared is lost to who held it"
        queue.clear()
        assert segments(queue) == []


def test_second_write_is_refused_and_takes_no_memory() -> None:
    with TransferQueue.serve({"train": ["x", "y"]}) as queue:
        queue.put({"x": torch.zeros(1)}, rows=[0])
        with pytest.raises(QueueError, match=r"has .* columns x already"):
            queue.put({"x": torch.ones(1)}, rows=[0])
        assert len(segments(queue)) == 1 and queue.usage()["rows"] == 1


def test_put_without_room_waits_then_names_row_holders() -> None:
    with (
        TransferQueue.serve({"train": ["x"]}, budget_bytes=15_000) as queue,
        TransferQueue.connect(queue.address, "reader") as reader,
    ):
        queue.put({"x": torch.zeros(2000)}, rows=list(range(2000)))
        held = reader.get("train", 500)
        with pytest.raises(QueueFull, match=r"0.1 s.*train has 2000.*\(reader holds 500\)"):
            queue.put({"x": torch.zeros(2000)}, rows=list(range(2000, 4000)), wait_s=0.1)
        waiting = threading.Thread(target=queue.put, args=({"x": torch.zeros(2000)}, list(range(2000, 4000))))
        waiting.start()
        assert held is not None
        reader.done(held)
        for _ in range(3):
            batch = reader.get("train", 500)
            assert batch is not None
            reader.done(batch)
        waiting.join(60)
        assert not waiting.is_alive() and queue.usage()["rows"] == 2000
        with pytest.raises(QueueError, match="budget is 15000"):
            queue.put({"x": torch.zeros(9000)}, rows=list(range(9000)))


@pytest.mark.parametrize(("batches", "pause_s"), [(40, 0.002), pytest.param(6_000, 0.01, marks=pytest.mark.soak)])
def test_fast_writer_stays_within_budget_without_loss(batches: int, pause_s: float) -> None:
    with TransferQueue.serve({"train": ["x"]}, budget_bytes=30_000) as queue:
        most, seen, rows, began = 0, Counter[int](), 100 * batches, time.monotonic()

        def write() -> None:
            for first in range(0, rows, 100):
                queue.put({"x": torch.zeros(100, 4)}, rows=list(range(first, first + 100)))
            queue.finish()

        writer = threading.Thread(target=write)
        writer.start()
        for batch in queue.stream("train", 100):
            seen.update(batch.rows)
            most = max(most, queue.usage()["bytes"])
            time.sleep(pause_s)
        writer.join()
        assert seen == Counter(range(rows)) and 0 < most <= 30_000
        print(f"{rows} rows in {time.monotonic() - began:.0f} s, at most {most} of 30,000 bytes in the queue")


def test_a_consumer_that_dies_loses_its_rows_to_another() -> None:
    with (
        TransferQueue.serve({"train": ["x"]}, lease_s=1.0) as queue,
        TransferQueue.connect(queue.address, "dead") as dead,
    ):
        queue.put({"x": torch.arange(4)}, rows=list(range(4)))
        queue.finish()
        assert dead.get("train", 2) is not None
        rows = [row for batch in queue.stream("train", 4) for row in batch.rows]
        assert sorted(rows) == [0, 1, 2, 3]


def test_an_event_loop_puts_and_takes_at_the_same_time() -> None:
    async def both(queue: TransferQueue) -> list[int]:
        async def write() -> None:
            for row in range(5):
                await queue.put_async({"x": torch.tensor([row])}, rows=[row])
            queue.finish()

        writing = asyncio.create_task(write())
        result = [row async for batch in queue.stream_async("train", 2) for row in batch.rows]
        await writing
        return result

    with TransferQueue.serve({"train": ["x"]}) as queue:
        assert sorted(asyncio.run(both(queue))) == [0, 1, 2, 3, 4]


@pytest.mark.soak
def test_two_programs_that_are_no_braid_use_it(tmp_path: Path) -> None:
    address = str(tmp_path / "address")
    run = [sys.executable, *["-W", "error"]]
    producer = subprocess.Popen([*run, "examples/queue_alone/producer.py", address], cwd=ROOT)
    done = subprocess.run(
        [*run, "examples/queue_alone/trainer.py", address], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert producer.wait(30) == 0
    assert done.stdout == "y = 3.00 x -1.00\n", done.stderr
