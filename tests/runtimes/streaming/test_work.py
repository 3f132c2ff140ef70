"""What the ranks of a worker have written reaches the queue as one report."""

import torch

from braidrl.data.rows import Rows
from braidrl.queue.table import Block, StoredRows, Table, TablePiece
from braidrl.runtimes.streaming.work import WrittenColumns


def written(rank: int, rows: int) -> WrittenColumns:
    block = Block("here", "tcp://127.0.0.1:1", f"braid-0-rank{rank}-0", 8)
    positions = list(range(10 * rank, 10 * rank + rows))
    return WrittenColumns(
        {"advantage": torch.tensor(positions) * 0.5}, [([TablePiece(block, ["x"], rows)], rows, [(7, positions)])]
    )


def test_columns_of_ranks_share_frames_and_come_back_as_parts() -> None:
    nothing = WrittenColumns({}, [])
    together = written(0, 2).of_both(nothing).of_both(written(2, 1).of_both(written(3, 3)))
    messages, frames = together.in_message()
    parts = StoredRows.received([message for message, _ in messages], [bytes(frame) for frame in frames], "train")
    assert [part.index["advantage"].tolist() for part in parts] == [[0.0, 0.5], [10.0], [15.0, 15.5, 16.0]]
    assert [rows for _, rows in messages] == [[(7, [0, 1])], [(7, [20])], [(7, [30, 31, 32])]]
    assert [len(part.blocks) for part in parts] == [1, 1, 1]


def test_ranks_without_index_columns_report_their_blocks() -> None:
    only_payload = WrittenColumns({}, written(1, 2).parts).of_both(WrittenColumns({}, written(2, 1).parts))
    messages, frames = only_payload.in_message()
    parts = StoredRows.received([message for message, _ in messages], frames)
    assert not frames and [len(part) for part in parts] == [2, 1]


def test_rows_are_found_by_group_and_sample() -> None:
    table = Rows({"group": torch.tensor([5, 4, 5, 4]), "sample": torch.tensor([1, 0, 0, 1])})
    wanted = Rows({"group": torch.tensor([4, 5, 4]), "sample": torch.tensor([1, 1, 0])})
    assert table.positions_of(wanted).tolist() == [3, 0, 1]


def test_index_columns_come_from_several_parts_in_the_order_of_rows() -> None:
    table = Table()
    for first, names in ((0, "abcdefgh"), (8, "ij"), (10, "klm")):
        numbers, positions = torch.arange(first, first + len(names)), {name: n for n, name in enumerate(names)}
        table.add(StoredRows(Rows({"number": numbers}), [], "check", dict(positions)))
        table.add(StoredRows(Rows({}), [TablePiece(None, ["x"], len(names))], "payload", dict(positions)))
    for rows in ("abcdefghijklm", "mlkjihgfedcba", "ja", "bik", "c"):
        assert table.index(list(rows), ["check", "payload"])["number"].tolist() == [ord(name) - 97 for name in rows]
