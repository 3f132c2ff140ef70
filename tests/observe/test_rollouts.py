"""Recorded rollouts are restored bit for bit, whatever they contain."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import Objects, Rows
from braidrl.errors import UserError
from braidrl.observe.recorded_rows import DTYPES, check_rows, read_rollouts, write_rollouts
from braidrl.observe.rollouts import (
    merge_parts,
    part_path,
    publish,
    read_texts,
    recorded_evaluations,
    recorded_steps,
    rollout_path,
)
from tests.observe.made_up import rows_of


def bits(values: Tensor) -> list[int]:
    """Return the bytes of a tensor, so that -0.0 and each kind of NaN count as themselves."""
    return list(values.contiguous().reshape(-1).view(torch.uint8).tolist()) if values.numel() else []


def assert_same(left: Rows, right: Rows) -> None:
    assert list(left) == list(right)
    assert len(left) == len(right)
    for name in left:
        a, b = left[name], right[name]
        assert type(a) is type(b)
        if isinstance(a, Objects):
            assert a.values == b.values
            continue
        if isinstance(a, Ragged):
            assert torch.equal(a.offsets, b.offsets)
            a, b = a.values, b.values
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert bits(a) == bits(b), name


def random_values(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return arbitrary bits, so that NaN with payloads, infinities and subnormals occur."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    dtype = DTYPES[name]
    lengths = torch.tensor([3, 0, 500, 1])
    rows = Rows(
        {
            "index": random_values(dtype, 4),
            "wide index": random_values(dtype, 4, 2),
            "greedy.tokens": Ragged.from_lengths(random_values(dtype, 504), lengths),
            "wide": Ragged.from_lengths(random_values(dtype, 504, 3, 2), lengths),
        }
    )
    write_rollouts(tmp_path / "a.parquet", rows, [""] * 4, [""] * 4)
    assert_same(read_rollouts(tmp_path / "a.parquet"), rows)


def test_zeros_of_both_signs_and_kinds_of_nan_stay_apart(tmp_path: Path) -> None:
    odd = torch.tensor([0x7FC00000, 0x7F800001, -0x400000, -0x80000000, 0], dtype=torch.int32).view(torch.float32)
    values = odd.repeat(200)
    rows = Rows({"values": Ragged.from_lengths(values, torch.tensor([1000]))})
    write_rollouts(tmp_path / "a.parquet", rows, ["p"], ["r"])
    assert_same(read_rollouts(tmp_path / "a.parquet"), rows)


@pytest.mark.parametrize("count", [0, 1])
def test_no_rows_and_no_values_keep_their_types(count: int, tmp_path: Path) -> None:
    empty = torch.zeros(0, dtype=torch.bfloat16)
    rows = Rows(
        {
            "score": torch.zeros(count, dtype=torch.float64),
            "wide": torch.zeros((count, 3), dtype=torch.int16),
            "values": Ragged.from_lengths(empty, torch.zeros(count)),
            "wide values": Ragged.from_lengths(torch.zeros((0, 2)), torch.zeros(count)),
            "metadata": Objects(({},) * count),
        }
    )
    write_rollouts(tmp_path / "a.parquet", rows, [""] * count, [""] * count)
    assert_same(read_rollouts(tmp_path / "a.parquet"), rows)


def test_a_table_without_columns_can_be_recorded(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "a.parquet", Rows({}), [], [])
    assert_same(read_rollouts(tmp_path / "a.parquet"), Rows({}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(json_values, max_size=4))
def test_any_json_value_comes_back(tmp_path_factory: Any, values: list[Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "objects.parquet"
    rows = Rows({"metadata": Objects(tuple(values))})
    write_rollouts(path, rows, [""] * len(values), [""] * len(values))
    assert read_rollouts(path)["metadata"].values == tuple(values)


def test_texts_stand_beside_the_rows_for_other_programs(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rollouts(path, rows_of(1), list("abcd"), ["é", "half a pair: \ud83d", "", "\n"])
    table = pq.read_table(path).to_pydict()
    assert table["prompt_text"] == list("abcd")
    assert table["response_text"] == ["é", "half a pair: ?", "", "\n"]
    assert table["tokens"][1] == [0, 1, 2]
    assert read_texts(path, ["score", "not there"])[0] == {"prompt_text": "a", "response_text": "é", "score": -1.0}


def test_failed_write_keeps_earlier_file_and_leaves_no_remains(tmp_path: Path) -> None:
    path = tmp_path / "step-1.parquet"
    write_rollouts(path, rows_of(1), list("abcd"), list("abcd"))
    unwritable = rows_of(1).with_columns({"odd": torch.zeros(4, dtype=torch.complex64)})
    with pytest.raises(ValueError, match=r"column odd .*complex64"):
        write_rollouts(path, unwritable, list("abcd"), list("abcd"))
    with pytest.raises(ValueError, match="3 response_text for 4 rows"):
        write_rollouts(path, rows_of(1), list("abcd"), list("abc"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1.parquet"]
    assert_same(read_rollouts(path), rows_of(1))


def test_recordings_are_found_by_step_and_evaluation(tmp_path: Path) -> None:
    texts = list("abcd")
    for path in (rollout_path(tmp_path, 10), rollout_path(tmp_path, 9), rollout_path(tmp_path, 5, "gsm8k-step-1")):
        write_rollouts(path, rows_of(1), texts, texts)
    assert recorded_steps(tmp_path) == [9, 10]
    assert recorded_evaluations(tmp_path) == ["gsm8k-step-1"]
    assert recorded_steps(tmp_path, "gsm8k-step-1") == [5]


def recorded_row(**changes: Any) -> Rows:
    """A row of two prompt tokens and three actions, with changed columns."""
    columns: dict[str, Any] = {
        "prompt": Ragged.from_lengths(torch.tensor([1, 2]), torch.tensor([2])),
        "tokens": Ragged.from_lengths(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([5])),
        "action_mask": Ragged.from_lengths(torch.tensor([0, 0, 1, 1, 1]).bool(), torch.tensor([5])),
        "rollout_log_probs": Ragged.from_lengths(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([3])),
        "sequence_lengths": Ragged.from_lengths(torch.tensor([3, 2]), torch.tensor([2])),
        "length": torch.tensor([5]),
        "score": torch.tensor([0.5]),
        "score_other": torch.tensor([float("nan")]),
    }
    return Rows({**columns, **changes})


EDITED: dict[str, tuple[Any, str]] = {
    "log-probs that are NaN": (
        {"rollout_log_probs": Ragged.from_lengths(torch.tensor([-1.0, float("nan"), -3.0]), torch.tensor([3]))},
        "rollout_log_probs",
    ),
    "log-probs that are infinite": (
        {"rollout_log_probs": Ragged.from_lengths(torch.tensor([-1.0, -float("inf"), -3.0]), torch.tensor([3]))},
        "rollout_log_probs",
    ),
    "a score that is NaN": ({"score": torch.tensor([float("nan")])}, "score"),
    "a length of 10**9": ({"length": torch.tensor([10**9])}, "length"),
    "a negative length": ({"length": torch.tensor([-5])}, "length"),
    "a mask of another row": (
        {"action_mask": Ragged.from_lengths(torch.tensor([1, 1]).bool(), torch.tensor([2]))},
        "action_mask",
    ),
    "log-probs above 0": (
        {"rollout_log_probs": Ragged.from_lengths(torch.tensor([-1.0, 5.0, -3.0]), torch.tensor([3]))},
        "rollout_log_probs",
    ),
    "a log-prob too few": (
        {"rollout_log_probs": Ragged.from_lengths(torch.tensor([-1.0, -2.0]), torch.tensor([2]))},
        "rollout_log_probs",
    ),
    "a prompt of 10**9 tokens": ({"prompt_length": torch.tensor([10**9])}, "prompt_length"),
    "a negative number of actions": ({"action_tokens": torch.tensor([-7])}, "action_tokens"),
    "sequences longer than the row": (
        {"sequence_lengths": Ragged.from_lengths(torch.tensor([3, 9]), torch.tensor([2]))},
        "sequence_lengths",
    ),
    "a sequence of negative length": (
        {"sequence_lengths": Ragged.from_lengths(torch.tensor([9, -4]), torch.tensor([2]))},
        "sequence_lengths",
    ),
    "a version below 0": ({"version": torch.tensor([-1])}, "version"),
    "an unknown end": ({"finish_reason": torch.tensor([77])}, "finish_reason"),
    "negative ids": ({"tokens": Ragged.from_lengths(torch.tensor([1, 2, -3, 4, 5]), torch.tensor([5]))}, "tokens"),
    "ids beyond the vocabulary": ({"prompt": Ragged.from_lengths(torch.tensor([1, 99]), torch.tensor([2]))}, "prompt"),
}


@pytest.mark.parametrize("kind", EDITED)
def test_edited_recording_is_refused_with_its_column(kind: str, tmp_path: Path) -> None:
    changes, named = EDITED[kind]
    check_rows(tmp_path, recorded_row(), 9)
    with pytest.raises(UserError, match=f"column {named} "):
        check_rows(tmp_path, recorded_row(**changes), 9)


def test_file_not_recorded_by_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no recorded rollouts"):
        read_rollouts(tmp_path / "step-1.parquet")
    write_rollouts(tmp_path / "a.parquet", rows_of(1), list("abcd"), list("abcd"))
    pq.write_table(pq.read_table(tmp_path / "a.parquet").replace_schema_metadata({}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="was not recorded by a run"):
        read_rollouts(tmp_path / "b.parquet")


def test_files_that_ranks_wrote_become_one_recording(tmp_path: Path) -> None:
    rows, path = rows_of(3, count=5), rollout_path(tmp_path, 3)
    parts = [part_path(path, rank) for rank in (0, 2)]
    write_rollouts(parts[0], rows.take([0, 1]), ["p0", "p1"], ["r0", "r1"])
    # A rank may hold its columns in another order.
    names = list(reversed(list(rows)))
    write_rollouts(parts[1], rows.only(names).take([2, 3, 4]), ["p2", "p3", "p4"], ["r2", "r3", "r4"])
    assert recorded_steps(tmp_path) == []
    assert merge_parts(path, 0, parts[:1]) == merge_parts(path, 1, parts[1:])
    publish(path)
    assert_same(read_rollouts(path), rows)
    assert [text["response_text"] for text in read_texts(path)] == [f"r{i}" for i in range(5)]
    assert list(path.parent.iterdir()) == [path]


def test_parts_with_other_columns_are_not_joined(tmp_path: Path) -> None:
    rows, path = rows_of(1, count=2), rollout_path(tmp_path, 1)
    parts = [part_path(path, rank) for rank in (0, 1)]
    write_rollouts(parts[0], rows, ["a", "b"], ["a", "b"])
    write_rollouts(parts[1], rows.without([next(iter(rows))]), ["a", "b"], ["a", "b"])
    with pytest.raises(ValueError, match="other columns"):
        merge_parts(path, 0, parts)
    assert not path.exists() and all(part.exists() for part in parts)
