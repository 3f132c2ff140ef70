"""Every storage backend keeps its contract, and a queue on it gives what was put; nothing stays when its owner goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from braidrl.errors import UserError
from braidrl.queue.owner import StorageNode, remove_abandoned
from braidrl.queue.storage import check_storage, open_storage
from braidrl.queue.transfer_queue import TransferQueue


@pytest.fixture(params=["shared_memory", "file", "redis"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return str(request.getfixturevalue("redis_server"))
    return f"file:{tmp_path}" if request.param == "file" else "shared_memory"


def test_every_storage_keeps_the_contract(storage: str) -> None:
    check_storage(storage)


def test_queue_returns_put_rows_on_any_storage_without_remains(storage: str) -> None:
    with TransferQueue.serve({"train": ["x"]}, storage=storage) as queue:
        run = queue.data.segments.run
        with TransferQueue.connect(queue.address) as other:
            queue.put({"x": [torch.arange(3), torch.arange(1)]}, rows=[0, 1])
            queue.put({"x": [torch.arange(2)]}, rows=[2])
            batch = other.get("train", 2)
            assert batch is not None and [row.tolist() for row in batch.torch()["x"]] == [[0, 1, 2], [0]]
            other.done(batch)
        assert len(open_storage(storage, run, "looker").names()) == 1
    assert open_storage(storage, run, "looker").names() == []


def test_next_run_removes_remains_of_killed_run(storage: str) -> None:
    dead = StorageNode("here", "127.0.0.1", storage=storage)
    dead.data.segments.write([b"left behind"])
    os.close(dead._handle)
    assert dead.run in remove_abandoned()
    assert dead.data.segments.names() == []
    dead.server.close()


def test_unknown_storage_error_lists_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="write shared_memory, file:/path or redis"):
        open_storage("shred_memory", "0", "test")
    with pytest.raises(UserError, match="there is no folder"):
        open_storage(f"file:{tmp_path}/nothing", "0", "test")


def test_a_file_storage_writes_into_its_folder(tmp_path: Path) -> None:
    name, _ = open_storage(f"file:{tmp_path}", "0", "test").write([b"abc"])
    assert (tmp_path / name).is_file()
