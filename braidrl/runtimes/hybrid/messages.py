"""What the driver and its workers say to each other, in as few bytes as it takes, and what rows the ranks of a pool give each other.

arguments ──stages by their number in the flow──▶ pickle ──deflate, with the usual words known to both──▶ message
index columns ──each in the narrowest type that holds its values──▶ bytes
each rank   what it needs of whom ──all-to-all──▶ what others need of it ──all-to-all──▶ payload
"""

import io
import pickle
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from braidrl.cluster.world import World
from braidrl.data.codec import DTYPES, encode, unpack_rows
from braidrl.data.frames import join, split
from braidrl.data.rows import IDENTITY, Rows
from braidrl.flow import Stage
from braidrl.flow.columns import ADMITTED, ADMITTED_IF_GIVEN
from braidrl.flow.compute import with_state
from braidrl.flow.signatures import COUNTED, GENERATED, PLAYED

NARROW = ("i1", "i2", "i4", "f2", "f4")
CODES = tuple(DTYPES)
METHODS = (
    "make", "execute", "generate_needed", "update", "publish", "record", "keep", "save", "load", "call_own", "sums",
)  # fmt: skip
METRICS = (
    "memory/", "/resident_max", "utilisation/operations/", "utilisation/bandwidth/actor.generate", "/update_seconds",
    "weights//received", "/rounds", "/seconds", "loss/", "/grad_norm", "/entropy", "/log_prob_mean", "/clip_fraction", "/kl_old",
)  # fmt: skip


class StagePickler(pickle.Pickler):
    """Writes a stage that both sides know as its number, with the parameters that differ."""

    def __init__(self, file: io.BytesIO, stages: Sequence[Stage]) -> None:
        super().__init__(file, protocol=5)
        self.places = {stage.name: place for place, stage in enumerate(stages)}
        self.stages = stages

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Stage) or value.name not in self.places:
            return None
        known = self.stages[place := self.places[value.name]]
        changed = {name: new for name, new in value.params.items() if known.params.get(name, value) != new}
        return (place, changed) if value == with_state(known, changed) else None


class StageUnpickler(pickle.Unpickler):
    """Reads what `StagePickler` wrote for the same stages."""

    def __init__(self, file: io.BytesIO, stages: Sequence[Stage]) -> None:
        super().__init__(file)
        self.stages = stages

    def persistent_load(self, pid: Any) -> Any:
        place, changed = pid
        return with_state(self.stages[place], changed)


@cache
def words() -> bytes:
    """Return what messages are likely to have in common, the likeliest last."""
    # Imported here: messages are of these, and these are written by this module.
    from braidrl.runtimes.hybrid.handles import Answer, Part

    columns = (
        *ADMITTED_IF_GIVEN, *PLAYED, *ADMITTED, "advantage", "advantages", "ref_log_probs", "old_log_probs", *COUNTED, *GENERATED,
    )  # fmt: skip
    rows = Rows({name: torch.zeros(1, dtype=torch.int64) for name in (*columns, *IDENTITY)})
    one = np.zeros(1, np.int64)
    kept = ((1, None, one, one), (2, GENERATED[:5], one, one))
    answer = pickle.dumps(Answer(pack_index(rows), GENERATED[:5], 1, 1, dict.fromkeys(METRICS, (0.0, 0)), 0.0, None), 5)
    asked = pickle.dumps(("execute", [Part(1, pack_index(rows.only(IDENTITY)), kept), 1, 1], ()), 5)
    return " ".join(METHODS).encode() + answer + asked


def pack(value: Any, stages: Sequence[Stage] = ()) -> bytes:
    """Return a message; `stages` are those that its reader knows too."""
    file = io.BytesIO()
    StagePickler(file, stages).dump(value)
    deflate = zlib.compressobj(wbits=-15, zdict=words())
    return deflate.compress(file.getbuffer()) + deflate.flush()


def unpack(message: bytes, stages: Sequence[Stage] = ()) -> Any:
    """Return what `pack` was given."""
    return StageUnpickler(io.BytesIO(zlib.decompressobj(wbits=-15, zdict=words()).decompress(message)), stages).load()


def narrowed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return numbers in the first of the narrow types that holds each of them exactly, or as they are."""
    for name in NARROW:
        if values.dtype.kind == name[0] and values.dtype.itemsize > int(name[1]):
            with np.errstate(over="ignore", invalid="ignore"):
                narrow = values.astype(name)
            if np.array_equal(narrow.astype(values.dtype), values):
                return narrow
    return values


def pack_index(rows: Rows) -> bytes:
    """Encode index columns (B,)."""
    columns = []
    for name in rows:
        column: Tensor = rows[name]
        dtype = str(column.dtype).removeprefix("torch.")
        plain = column.detach().cpu()
        values = plain.float().numpy() if dtype == "bfloat16" else plain.numpy()
        narrow = narrowed(values)
        columns.append((name, CODES.index(dtype), narrow.dtype.str[1:], narrow.tobytes()))
    packed: bytes = msgpack.packb((len(rows), columns))
    return packed


def unpack_index(message: bytes) -> Rows:
    """Decode what `pack_index` returned; an empty message is no rows."""
    if not message:
        return Rows({})
    _, columns = msgpack.unpackb(message)
    return Rows({name: _column(CODES[code], kind, values) for name, code, kind, values in columns})


def _column(dtype: str, kind: str, values: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(values, dtype=kind).copy()).to(DTYPES[dtype])


class Asked(NamedTuple):
    """Rows that were asked for: of which rank, and the number of the request among those to it."""

    rank: int
    number: int


class PoolExchange:
    """One exchange; every rank of the pool makes it, also one that needs nothing."""

    def __init__(self, world: World, own: Callable[[int, NDArray[np.int64], tuple[str, ...]], Rows]) -> None:
        """`own` returns rows that are kept here, by their key, their numbers (n,) and the names of columns."""
        self.world, self.own = world, own
        self.requests: list[list[tuple[int, bytes, tuple[str, ...]]]] = [[] for _ in range(world.size)]

    def ask(self, rank: int, key: int, rows: NDArray[np.int64], columns: tuple[str, ...]) -> Asked:
        """Note rows that are needed of another rank."""
        self.requests[rank].append((key, rows.astype(np.int64).tobytes(), columns))
        return Asked(rank, len(self.requests[rank]) - 1)

    def rows(self) -> dict[Asked, Rows]:
        """Exchange, and return what was asked for."""
        asked = self.world.exchange("the rows that ranks need", [msgpack.packb(own) for own in self.requests])
        came = self.world.exchange("rows of the pool", [self._answer(requests) for requests in asked])
        return {
            Asked(rank, number): unpack_rows(packed)
            for rank, message in enumerate(came)
            if len(message)
            for number, packed in enumerate(split(message))
        }

    def _answer(self, requests: memoryview) -> bytearray:
        wanted = [
            (key, np.frombuffer(rows, np.int64), tuple(columns)) for key, rows, columns in msgpack.unpackb(requests)
        ]
        return join([join(encode(self.own(*each))) for each in wanted]) if wanted else bytearray()
