"""Transfer protocols call each rank with the right rows, and collect the right results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from braidrl.errors import UserError
from braidrl.flow.signatures import registration_of
from braidrl.runtimes.hybrid.protocol_contract import Numbered, check_protocol
from braidrl.runtimes.hybrid.protocols import (
    DP,
    PROTOCOLS,
    Arguments,
    Mesh,
    RankCalls,
    TransferProtocol,
    register,
)

OWN = Path(__file__).parents[3] / "examples" / "own_protocol" / "methods.py"


class Worker:
    @register(protocol="DP")
    def double(self, numbers: Numbered, factor: int) -> Numbered:
        return Numbered(factor * number for number in numbers)

    @register(protocol="ONE_TO_ALL")
    def echo(self, word: str) -> str:
        return word

    @register(protocol="RANK_ZERO")
    def name(self) -> str:
        return "zero"

    @register(protocol="ALL_TO_ALL")
    def add(self, first: int, second: int) -> int:
        return first + second

    def unregistration_of(self) -> None: ...


def called(method: str, ranks: int, *arguments: Any) -> Any:
    """Call methods as a driver does, on one worker in this process for all ranks."""
    protocol, mesh, worker = registration_of(Worker, method).protocol, Mesh(ranks), Worker()
    calls = protocol.distribute(mesh, *arguments)
    assert len(calls) == ranks
    return protocol.collect(mesh, calls, [getattr(worker, method)(*call) for call in calls if call is not None])


def test_one_to_all_calls_every_rank_with_the_same() -> None:
    assert called("echo", 3, "hello") == ["hello"] * 3


def test_rank_zero_alone_is_called_and_answers() -> None:
    assert called("name", 3) == "zero"


def test_all_to_all_gives_each_rank_its_own_rows() -> None:
    assert called("add", 3, [1, 2, 3], [10, 20, 30]) == [11, 22, 33]
    with pytest.raises(ValueError, match="2 arguments for 3 workers"):
        called("add", 3, [1, 2], [1, 2, 3])


def test_data_parallel_protocol_splits_rows_and_joins_results() -> None:
    assert called("double", 2, Numbered([1, 2, 3]), 5) == (5, 10, 15)
    assert called("double", 4, Numbered([7]), 2) == (14,)
    assert PROTOCOLS.find("DP").distribute(Mesh(2), Numbered([7]), 2) == [((), 2), ((7,), 2)]


@pytest.mark.parametrize("name", ["DP", "THREE_D", "THREE_D_MICRO_DP", "PP_AS_DP"])
def test_protocols_that_distribute_rows_keep_the_contract(name: str) -> None:
    check_protocol(PROTOCOLS.find(name))


# Ranks 0 to 7: (pipeline, data, tensor) = (2, 2, 2), tensor fastest.
MESH = Mesh(2, pipeline=2, tensor=2)


def given_rows(name: str, mesh: Mesh = MESH) -> list[Any]:
    calls = PROTOCOLS.find(name).distribute(mesh, Numbered(range(8)), "more")
    assert all(call is not None and call[1] == "more" for call in calls)
    return [tuple(call[0]) for call in calls if call is not None]


def kept_results(name: str, mesh: Mesh = MESH) -> Any:
    """Return the collected result when each rank returns its own number."""
    calls = PROTOCOLS.find(name).distribute(mesh, Numbered(range(8)))
    return PROTOCOLS.find(name).collect(mesh, calls, list(range(mesh.size)))


def test_ranks_of_one_copy_share_rows_and_last_pipeline_answers() -> None:
    first, second = (0, 1, 2, 3), (4, 5, 6, 7)
    assert given_rows("THREE_D") == [first, first, second, second] * 2
    assert kept_results("THREE_D") == [4, 6]


def test_generation_group_shares_rows_and_one_rank_answers() -> None:
    mesh = Mesh(2, tensor=4, generation=((0, 2), (1, 3), (4, 6), (5, 7)))
    assert given_rows("THREE_D_MICRO_DP", mesh) == [(0, 1), (2, 3), (0, 1), (2, 3), (4, 5), (6, 7), (4, 5), (6, 7)]
    assert kept_results("THREE_D_MICRO_DP", mesh) == [0, 1, 4, 5]
    assert given_rows("THREE_D_MICRO_DP", Mesh(8)) == [(row,) for row in range(8)]


def test_pipeline_ranks_take_rows_as_data_ranks_do() -> None:
    assert given_rows("PP_AS_DP") == [(0, 1), (0, 1), (4, 5), (4, 5), (2, 3), (2, 3), (6, 7), (6, 7)]
    assert kept_results("PP_AS_DP") == [0, 4, 2, 6]


def test_one_rank_per_pipeline_stage_answers() -> None:
    assert PROTOCOLS.find("PP_ONLY").distribute(MESH, 3) == [(3,)] * 8
    assert kept_results("PP_ONLY") == [0, 4]


def test_user_protocol_from_file_keeps_contract() -> None:
    check_protocol(PROTOCOLS.find(f"{OWN}:IN_TURN"))
    with pytest.raises(UserError, match=r"'DB'.*DP.*Your own is written module:name"):
        register(protocol="DB")
    with pytest.raises(UserError, match="has no TransferProtocol 'in_turn'"):
        register(protocol=f"{OWN}:in_turn")


def twice(mesh: Mesh, rows: Numbered, *arguments: Any) -> RankCalls:
    return [(rows, *arguments)] * mesh.size


def without_the_last(mesh: Mesh, rows: Numbered, *arguments: Any) -> RankCalls:
    return DP.distribute(mesh, rows.take(range(len(rows) - 1)), *arguments)


def one_call(mesh: Mesh, rows: Numbered, *arguments: Any) -> RankCalls:
    return [(rows, *arguments)]


def no_rank(mesh: Mesh, rows: Numbered, *arguments: Any) -> RankCalls:
    return [None] * mesh.size


def backwards(mesh: Mesh, calls: RankCalls, results: list[Numbered]) -> Numbered:
    return Numbered.cat(results[::-1])


@pytest.mark.parametrize(
    ("distribute", "collect", "message"),
    [
        (twice, DP.collect, r"WRONG .*1 rows on 2.*: collect"),
        (without_the_last, DP.collect, "1 rows on 1 workers: distribute"),
        (one_call, DP.collect, r"0 rows on 2.*: distribute .*1"),
        (no_rank, DP.collect, "distribute calls no rank"),
        (lambda mesh, rows, *_: DP.distribute(mesh, rows), DP.collect, r"loses or changes .*not rows"),
        (DP.distribute, backwards, r"2 rows on 2.*: collect.* order"),
    ],
)
def test_the_contract_names_a_protocols_fault(distribute: Any, collect: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_protocol(TransferProtocol("WRONG", distribute, collect))


def test_register_accepts_protocol_object_instead_of_name() -> None:
    def to_last(mesh: Mesh, *arguments: Any) -> list[Arguments | None]:
        return [None] * (mesh.size - 1) + [arguments]

    last = TransferProtocol("LAST", to_last, lambda mesh, calls, results: results[-1])

    class Last(Worker):
        @register(protocol=last, reads=("tokens",), writes=("score",))
        def name(self) -> str:
            return "last"

    result = registration_of(Last, "name")
    assert (result.protocol, result.reads, result.writes) == (last, ("tokens",), ("score",))
    assert registration_of(Last, "echo") == registration_of(Worker, "echo")


def test_unknown_protocols_and_unregistered_methods_are_refused() -> None:
    with pytest.raises(UserError, match=r"no transfer protocol is called 'ONE_TO_AL'.*ONE_TO_ALL"):
        register(protocol="ONE_TO_AL")
    with pytest.raises(UserError, match=r"Worker .*'unregistered' with @register"):
        registration_of(Worker, "unregistered")
    with pytest.raises(UserError, match=r"Worker has no method 'ecko'.*'echo'"):
        registration_of(Worker, "ecko")
