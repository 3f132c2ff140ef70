"""Segments of a run's payload are read whole by every process of the node, and nothing stays when their owner goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from braidrl.queue.storage import Owner, Segments, remove_abandoned
from braidrl.queue.transfer_queue import TransferQueue


def test_a_segment_is_read_until_it_is_freed(tmp_path: Path) -> None:
    writer, reader = Segments("ab", "one/writer", tmp_path), Segments("ab", "reader", tmp_path)
    name, size = writer.write([b"first", b"", b"second"])
    assert size == (tmp_path / name).stat().st_size
    views = reader.read(name)
    assert [bytes(view) for view in views] == [b"first", b"", b"second"]
    other, _ = reader.write([b"other"])
    assert reader.names() == sorted([name, other]) and reader.names("one/writer") == [name]
    assert Segments("cd", "reader", tmp_path).names() == [], "another run's"
    reader.unlink([name, name])
    assert bytes(views[0]) == b"first" and writer.names() == [other]
    with pytest.raises(FileNotFoundError):
        reader.read(name)
    for leave in (reader.read, lambda name: reader.unlink([name])):
        with pytest.raises(ValueError, match="no segment's name"):
            leave("../braid-ab-writer-0")


def test_payload_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BRAID_SHARED_MEMORY", str(tmp_path))
    with TransferQueue.serve({"train": ["x"]}) as queue:
        with TransferQueue.connect(queue.address) as other:
            queue.put({"x": [torch.arange(3), torch.arange(1)]}, rows=[0, 1])
            queue.put({"x": [torch.arange(2)]}, rows=[2])
            batch = other.get("train", 2)
            assert batch is not None and [row.tolist() for row in batch.torch()["x"]] == [[0, 1, 2], [0]]
            other.done(batch)
        segments = Segments(queue.data.segments.run, "looker", tmp_path)
        assert len(segments.names()) == 1
    assert list(tmp_path.iterdir()) == []


def test_next_run_removes_remains_of_killed_run(tmp_path: Path) -> None:
    dead = Owner(tmp_path)
    segments = Segments(dead.run, "writer", tmp_path)
    segments.write([b"left behind"])
    os.close(dead._handle)
    assert dead.run in remove_abandoned(tmp_path)
    assert segments.names() == []
