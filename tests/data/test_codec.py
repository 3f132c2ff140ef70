"""Columns pass through the codec unchanged, or an error names the fault."""

import threading
import zlib
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.data.codec import (
    DTYPES,
    MARK,
    PayloadForbidden,
    decode,
    encode,
    payload_forbidden,
    read_header,
)
from braidrl.data.messages import ALIGNMENT, CodecError, Frame, join, split
from braidrl.data.rows import Column, Objects, Rows

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def some_tensor(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    seed = draw(st.integers(0, 1000))
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    if dtype == torch.bool:
        return bits[..., 0] > 127
    return bits.to(torch.uint8).view(dtype).reshape(shape)


@st.composite
def tables(draw: st.DrawFn) -> Rows:
    size = draw(st.integers(0, 5))
    columns: dict[str, Column] = {}
    for name in draw(st.lists(st.text(max_size=8), unique=True, max_size=5)):
        kind = draw(st.sampled_from(["index", "ragged", "objects"]))
        if kind == "index":
            columns[name] = some_tensor(draw, (size,))
        elif kind == "ragged":
            lengths = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
            width = draw(st.sampled_from([(), (3,), (0,)]))
            columns[name] = Ragged.from_lengths(
                some_tensor(draw, (sum(lengths), *width)), torch.tensor(lengths, dtype=torch.int64)
            )
        else:
            columns[name] = Objects(tuple(draw(st.lists(json_values, min_size=size, max_size=size))))
    return Rows(columns)


def content(column: Column) -> Any:
    """Return a column's content bit by bit, so that a NaN equals itself."""
    if isinstance(column, Objects):
        return column.values
    if isinstance(column, Ragged):
        return content(column.offsets), content(column.values)
    return column.dtype, column.shape, column.reshape(-1).view(torch.uint8).tolist()


def contents(rows: Rows) -> list[tuple[str, Any]]:
    return [(name, content(column)) for name, column in rows.items()]


def some_rows() -> Rows:
    return Rows(
        {
            "group": torch.tensor([4, 4, 9]),
            "tokens": Ragged.from_rows([[1, 2], [], [3, 4, 5]], torch.int64),
            "action_mask": Ragged.from_rows([[0, 1], [], [0, 1, 1]], torch.bool),
            "reward": torch.tensor([1.0, 0.5, -1.0]),
            "metadata": Objects(({"answer": "4"}, None, [1, "ü"])),
        }
    )


@given(tables())
def test_rows_come_back_with_every_column_bit_for_bit(rows: Rows) -> None:
    assert contents(decode(encode(rows))) == contents(rows)
    assert contents(decode(split(join(encode(rows))))) == contents(rows)


@given(tables(), st.data())
def test_damaged_bytes_raise_or_give_rows_of_the_same_form(rows: Rows, data: st.DataObject) -> None:
    buffer = join(encode(rows))
    place = data.draw(st.integers(0, len(buffer) - 1))
    buffer[place] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode(split(buffer))
    except CodecError:
        return
    assert [(name, type(column)) for name, column in decoded.items()] == [(n, type(c)) for n, c in rows.items()]
    assert len(decoded) == len(rows)


@given(tables(), st.data())
def test_truncated_codec_bytes_raise_an_error(rows: Rows, data: st.DataObject) -> None:
    buffer = join(encode(rows))
    with pytest.raises(CodecError):
        split(buffer[: data.draw(st.integers(0, len(buffer) - 1))])
    frames = encode(rows)
    with pytest.raises(CodecError):
        decode(frames[: data.draw(st.integers(0, len(frames) - 1))])


def test_neither_direction_copies_a_tensor() -> None:
    values = torch.arange(1000)
    rows = Rows({"tokens": Ragged.from_lengths(values, torch.tensor([400, 600]))})
    frames = encode(rows)
    decoded = decode(frames)["tokens"].values
    assert decoded.data_ptr() == values.data_ptr()
    buffer = join(frames)
    shared = decode(split(buffer))["tokens"].values
    values[5] = -1
    assert decoded[5] == -1 and shared[5] == 5
    assert shared.data_ptr() == torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() + len(buffer) - 8000


def test_frames_begin_at_multiples_of_64_in_any_larger_buffer() -> None:
    frames: list[Frame] = [b"a", b"", b"x" * 65, bytearray(b"yz")]
    joined = join(frames)
    block = joined + bytearray(1000)
    views = split(block)
    assert views == frames and len(joined) % ALIGNMENT == 0
    base = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
    starts = [torch.frombuffer(view, dtype=torch.uint8).data_ptr() - base for view in views if len(view)]
    assert all(start % ALIGNMENT == 0 for start in starts)


def test_named_columns_are_decoded_alone_and_in_the_order_asked_for() -> None:
    frames = encode(some_rows())
    assert list(decode(frames, ["reward", "tokens"])) == ["reward", "tokens"]
    assert contents(decode(frames, list(some_rows().index))) == contents(some_rows().index)
    with pytest.raises(KeyError, match="'rewards' among group, tokens"):
        decode(frames, ["rewards"])


def test_payload_is_refused_in_every_thread_of_a_process_that_schedules() -> None:
    frames = encode(some_rows())
    refused: list[str] = []

    def decode_all() -> None:
        try:
            decode(frames)
        except PayloadForbidden as error:
            refused.append(str(error))

    with payload_forbidden():
        with payload_forbidden():
            pass
        thread = threading.Thread(target=decode_all)
        thread.start()
        thread.join()
        decode_all()
        assert contents(decode(frames, list(some_rows().index))) == contents(some_rows().index)
        with pytest.raises(PayloadForbidden, match="metadata"):
            decode(frames, ["metadata"])
    assert len(refused) == 2 and "tokens" in refused[0]
    assert contents(decode(frames)) == contents(some_rows())


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), float("inf"), {1}, b"x", object(), {"a": [(1,)]}])
def test_an_object_that_is_not_json_is_named_by_column_and_row(value: Any) -> None:
    rows = Rows({"metadata": Objects(({}, value, {}))})
    with pytest.raises(CodecError, match=r"column 'metadata', row 1: .*JSON value"):
        encode(rows)


def test_a_dtype_that_does_not_travel_is_named() -> None:
    with pytest.raises(CodecError, match="column 'phase' is complex64"):
        encode(Rows({"phase": torch.zeros(2, dtype=torch.complex64)}))


def test_foreign_bytes_are_not_decoded_as_rows() -> None:
    with pytest.raises(CodecError, match="not rows"):
        decode([b"\x80\x04\x95pickle"])
    with pytest.raises(CodecError, match="not hold frames"):
        split(bytes(64))


def header_frame(header: object) -> bytes:
    packed = msgpack.packb(header)
    return MARK + zlib.crc32(packed).to_bytes(4, "little") + packed


@pytest.mark.parametrize(
    "header",
    [
        7,
        [2],
        [2, 7],
        ["2", []],
        [2, [["a", "pickle", "int64", [2]]]],
        [2, [["a", [], "int64", [2]]]],
        [2, [["a", "index", "int64", [-2]]]],
        [2, [["a", "index", "int64", []]]],
        [2, [["a", "index", ["int64"], [2]]]],
        [2, [["a", "index", "object", [2]]]],
        [2, [["a", "index", "int64", [3]]]],
        [1, [["a", "index", "int64", [2]]]],
        [-1, [["a", "ragged", "int64", [2]]]],
        [2, [["a", "index", "int64", [2]], ["a", "index", "int64", [2]]]],
    ],
)
def test_a_header_that_describes_no_columns_is_refused(header: object) -> None:
    for count in range(4):
        for frame in (bytes(16), b""):
            with pytest.raises(CodecError):
                decode([header_frame(header), *[frame] * count])


def test_damaged_payload_is_named_by_its_column() -> None:
    size, headers = read_header(encode(some_rows()))
    assert size == 3 and [h.kind for h in headers] == ["index", "ragged", "ragged", "index", "objects"]
    frames = encode(some_rows())
    offsets = torch.tensor([0, 4, 2, 5])
    damaged = [*frames[:2], offsets.numpy().data.cast("B"), *frames[3:]]
    with pytest.raises(CodecError, match="'tokens': its offsets"):
        decode(damaged)
    with pytest.raises(CodecError, match="'metadata' is not JSON"):
        decode([*frames[:-1], b"[{"])
    with pytest.raises(CodecError, match="'metadata' is not JSON"):
        decode([*frames[:-1], b"[" * 100_000])
    with pytest.raises(CodecError, match="'action_mask': bytes that are neither"):
        decode([*frames[:5], b"\x02" * 5, *frames[6:]])
