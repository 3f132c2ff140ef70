"""Contract test of transfer protocols that divide rows; call it from a test of your own protocol.

from braidrl.runtimes.hybrid.protocol_contract import check_protocol

check_protocol(IN_TURN)
"""

import itertools
from collections.abc import Sequence

from braidrl.runtimes.hybrid.protocols import Mesh, TransferProtocol


class Numbered(tuple[int, ...]):
    """A table of row numbers."""

    def divide(self, parts: int) -> "list[Numbered]":
        edges = [len(self) * n // parts for n in range(parts + 1)]
        return [Numbered(self[edges[n] : edges[n + 1]]) for n in range(parts)]

    def take(self, positions: Sequence[int]) -> "Numbered":
        return Numbered(self[position] for position in positions)

    @staticmethod
    def cat(tables: "Sequence[Numbered]") -> "Numbered":
        return Numbered(row for table in tables for row in table)


MESHES = (
    *(Mesh(size) for size in range(1, 9)),
    *(Mesh(d, p, t) for p in (1, 2, 4) for t in (1, 2, 4) for d in (1, 2, 3)),
    Mesh(2, 2, 1, 2),
    Mesh(2, tensor=4, generation=((0, 2), (1, 3), (4, 6), (5, 7))),
    Mesh(2, 2, 2, generation=((0, 4), (1, 5), (2, 6), (3, 7))),
)
"""Meshes of one process to some dozen, with every axis divided, also with generation groups."""


def check_protocol(protocol: TransferProtocol) -> None:
    """Check that workers which return their rows return all rows once and in order, for up to 19 rows on any mesh.

    The protocol's methods take rows and further arguments; it may send a row to several workers. Raises AssertionError
    with the violated rule, and the numbers of rows and workers.
    """
    constant = object()
    for mesh, count in itertools.product(MESHES, range(20)):
        rows, case = Numbered(range(count)), f"{protocol.name} of {count} rows on {mesh.size} workers"
        calls = protocol.distribute(mesh, rows, constant)
        assert len(calls) == mesh.size, f"{case}: distribute has {len(calls)} entries; write one for each worker"
        called = [call for call in calls if call is not None]
        assert called, f"{case}: distribute calls no rank"
        assert all(call[1:] == (constant,) for call in called), f"{case}: distribute loses or changes what is not rows"
        distributed = [row for call in called for row in call[0]]
        assert set(distributed) == set(rows), f"{case}: distribute gives rows {distributed}; each has to be given"
        back = protocol.collect(mesh, calls, [call[0] for call in called])
        assert back == rows, f"{case}: collect returns rows {back}; they have to be all, in their order"
