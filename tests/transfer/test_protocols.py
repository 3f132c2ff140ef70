"""Transfer protocols: what each rank is called with, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from braidrl.errors import UserError
from braidrl.transfer.protocols import PROTOCOLS, Mesh, define, protocol_of, register


class Numbers(list[int]):
    """Numbers that are dealt out in turn."""

    def divide(self, parts: int) -> list[Numbers]:
        return [Numbers(self[rank::parts]) for rank in range(parts)]


class Worker:
    @register(protocol="DP")
    def double(self, numbers: Numbers, factor: int) -> list[int]:
        return [factor * number for number in numbers]

    @register(protocol="DP_TOGETHER")
    def double_together(self, numbers: Numbers, factor: int) -> list[int]:
        return [factor * number for number in numbers]

    @register(protocol="ONE_TO_ALL")
    def echo(self, word: str) -> str:
        return word

    @register(protocol="RANK_ZERO")
    def name(self) -> str:
        return "zero"

    @register(protocol="ALL_TO_ALL")
    def add(self, first: int, second: int) -> int:
        return first + second

    def unregistered(self) -> None: ...


def called(method: str, ranks: int, *arguments: Any) -> Any:
    """Calls as a driver would, on one worker in this process for all ranks."""
    protocol, mesh, worker = protocol_of(Worker, method), Mesh(ranks), Worker()
    calls = protocol.distribute(mesh, *arguments)
    assert len(calls) == ranks
    return protocol.collect(mesh, calls, [getattr(worker, method)(*call) for call in calls if call is not None])


@pytest.fixture
def own_protocol() -> Iterator[str]:
    yield "LAST_RANK"
    PROTOCOLS.pop("LAST_RANK", None)


def test_one_to_all_calls_every_rank_with_the_same() -> None:
    assert called("echo", 3, "hello") == ["hello"] * 3


def test_a_rank_without_rows_is_called_only_where_all_compute_together() -> None:
    assert called("double", 3, Numbers([1, 2]), 10) == [([1], [10]), ([2], [20])]
    assert called("double_together", 3, Numbers([1, 2]), 10) == [([1], [10]), ([2], [20]), ([], [])]


def test_rank_zero_alone_is_called_and_answers() -> None:
    assert called("name", 3) == "zero"


def test_all_to_all_gives_each_rank_its_own() -> None:
    assert called("add", 3, [1, 2, 3], [10, 20, 30]) == [11, 22, 33]
    with pytest.raises(ValueError, match="2 arguments for 3 workers"):
        called("add", 3, [1, 2], [1, 2, 3])


def test_data_parallel_deals_rows_out_and_leaves_ranks_without_rows_alone() -> None:
    assert called("double", 2, Numbers([1, 2, 3]), 5) == [([1, 3], [5, 15]), ([2], [10])]
    assert called("double", 4, Numbers([7]), 2) == [([7], [14])]


def test_a_user_adds_protocols_of_their_own(own_protocol: str) -> None:
    define(own_protocol, lambda mesh, *a: [None] * (mesh.size - 1) + [a], lambda mesh, calls, results: results[-1])

    class Last(Worker):
        @register(protocol=own_protocol)
        def name(self) -> str:
            return "last"

    protocol = protocol_of(Last, "name")
    assert protocol.distribute(Mesh(3)) == [None, None, ()]
    assert protocol.collect(Mesh(3), [None, None, ()], ["last"]) == "last"
    with pytest.raises(ValueError, match="LAST_RANK already"):
        define(own_protocol, lambda mesh: [], lambda mesh, calls, results: None)


def test_unknown_protocols_and_unregistered_methods_are_refused() -> None:
    with pytest.raises(UserError, match=r"no transfer protocol is called 'ONE_TO_AL'.*ONE_TO_ALL"):
        register(protocol="ONE_TO_AL")
    with pytest.raises(TypeError, match=r"Worker.unregistered has no transfer protocol"):
        protocol_of(Worker, "unregistered")
