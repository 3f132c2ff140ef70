"""A sharded engine in several processes, each with a slice of the model: a leader, and followers forked before it computes anything.

run ──▶ leader ──Lockstep: rows, then step, clear or publish──▶ follower, follower, ...        within a step they run collectives
               ◀──"" when done, or an error───────────────────┘                               a closed pipe: the leader ended, all end

All execute the same calls in the same order. Sampling is deterministic, so all processes draw the same tokens and only the leader
returns results.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from braidrl.cluster.local import LOOK_EVERY_S, LocalProcess, fork
from braidrl.cluster.process import LOOPBACK
from braidrl.cluster.process_groups import connect_store, join_group, open_store
from braidrl.data.messages import pack_message, unpack_message
from braidrl.data.rows import Uid
from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.engines.embedded.sharded_decoding import TensorRanks, load_for_decoding
from braidrl.engines.engine import EngineError, EngineSpec
from braidrl.engines.requests import EngineRow, Request, Response
from braidrl.native.malloc import keep_freed_memory
from braidrl.training.loading import load_tokenizer
from braidrl.weights.collective import Incoming, TransferNotice
from braidrl.weights.file import WeightFile
from braidrl.weights.publisher import WeightSource


class Lockstep(msgspec.Struct, omit_defaults=True):
    """The next step of all processes: rows are added and aborted, in this order, then one call follows. `publish` is acknowledged."""

    rows: list[Request | Uid]
    """Requests that are added, and the uids of rows that are aborted."""
    call: Literal["step", "clear", "publish"]
    release: bool = True
    """The argument of `clear`."""
    version: int = 0
    path: str | None = None
    """The file of the weights."""
    notice: TransferNotice | None = None
    """The transfer of the weights over a process group; with neither the weights stay."""


def fork_followers(spec: EngineSpec, inherited: int) -> list[LocalProcess]:
    """Fork the followers of an engine, ranks 1 and up.

    Args:
        spec: Their engine.
        inherited: A descriptor that followers close: through it the run notices the leader's end.
    """
    followers: list[LocalProcess] = []
    for rank in range(1, spec.tensor):
        kept = [inherited, *(process.connection.fileno() for process in followers)]
        followers.append(fork(f"follower {rank}", partial(_run, rank, spec), kept))
    return followers


ENDING_S = 10.0
"""Seconds to look for the process that caused a failure: its connections close before it ends, on a busy machine seconds before."""
DONE = ""
FAILED = 1


class LeadingEngine(EmbeddedEngine):
    """The leader's engine, used like one that has the full model. After a failure of any process every call raises `EngineError`."""

    def __init__(self, spec: EngineSpec, followers: Sequence[LocalProcess]) -> None:
        """Make the engine once every process has loaded its slices; processes wait for one another `limit_s` seconds.

        Raises UserError for a model that cannot be used, and EngineError for a follower that fails.
        """
        store = open_store(LOOPBACK, spec.limit_s)
        for process in followers:
            process.connection.send_bytes(pack_message(store.port))
        super().__init__(**_parts(spec, 0, store))
        self._followers, self._limit_s = followers, spec.limit_s
        self._pending: list[Request | Uid] = []
        """Rows that were added or aborted since the last call."""
        self._failure: EngineError | None = None
        with self._in_lockstep():
            self._wait()

    def _wait(self) -> None:
        """Wait for an acknowledgement of each follower. Raises TimeoutError without one, and RuntimeError for an error."""
        deadline = time.monotonic() + self._limit_s
        for pipe in (process.connection for process in self._followers):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no word in {self._limit_s:g} s")
            if error := unpack_message(pipe.recv_bytes(), str):
                raise RuntimeError(error)

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        """Publish weights to all processes; each loads its own part. Raises ValueError for a source that other processes cannot read."""
        call = Lockstep([], "publish", version=version)
        if isinstance(source, WeightFile):
            self._weights.checked(source)
            call.path = str(source.path)
        elif isinstance(source, Incoming):
            call.notice = source.notice
        elif source is not None:
            raise ValueError(
                "an engine of several processes takes weights from a file, or in a group that all of them join"
            )
        with self._in_lockstep(call):
            super().publish(version, source)
            # The file may be gone once this returns.
            self._wait()

    def step(self) -> list[Response]:
        with self._in_lockstep(Lockstep([], "step")):
            return super().step()

    def abort(self, uid: Uid) -> Response:
        finished = super().abort(uid)
        self._pending.append(uid)
        return finished

    def clear(self, release: bool = True) -> None:
        super().clear(release)
        if self._failure is None:
            with self._in_lockstep(Lockstep([], "clear", release)):
                pass

    def recover(self) -> int:
        """Raise EngineError after any failure: processes that are out of step cannot be resynchronized."""
        if self._failure is not None:
            raise self._failure
        return super().recover()

    def _accept(self, row: EngineRow) -> None:
        super()._accept(row)
        self._pending.append(replace(row.request, on_token=None))

    @contextmanager
    def _in_lockstep(self, call: Lockstep | None = None) -> Iterator[None]:
        """Send a call with the pending rows. Mark the engine as failed if anything inside fails: its processes are then out of step."""
        if self._failure is not None:
            raise self._failure
        try:
            if call is not None:
                call.rows, self._pending = self._pending, []
                message = pack_message(call)
                for process in self._followers:
                    process.connection.send_bytes(message)
            yield
        except Exception as error:
            # Name the process that ended, or the processes that were waited for.
            processes, deadline = self._followers, time.monotonic() + ENDING_S
            while all(process.alive for process in processes) and time.monotonic() < deadline:
                time.sleep(LOOK_EVERY_S)
            names = [f"{process.name} (process {process.pid})" for process in processes]
            statuses = [process.status for process in processes]
            ended = [
                f"{n} ended; its exit status is {s}" for n, s in zip(names, statuses, strict=True) if s is not None
            ]
            seen = f"{type(error).__name__}: {error}".splitlines()[0]
            self._failure = EngineError(f"{'; '.join(ended) or ', '.join(names) + ' was waited for'} ({seen})")
            raise self._failure from error


def _run(rank: int, spec: EngineSpec, pipe: Connection) -> None:
    """Run a follower in its own process: execute the leader's calls, and acknowledge weights, which the leader waits for."""
    try:
        port = unpack_message(pipe.recv_bytes(), int)
        keep_freed_memory()
        engine = EmbeddedEngine(**_parts(spec, rank, connect_store(LOOPBACK, port, spec.limit_s)))
        pipe.send_bytes(pack_message(DONE))
        while True:
            call = unpack_message(pipe.recv_bytes(), Lockstep)
            for row in call.rows:
                if isinstance(row, Request):
                    engine.add(row)
                else:
                    engine.abort(row)
            if call.call == "step":
                engine.step()
            elif call.call == "clear":
                engine.clear(call.release)
            else:
                incoming = Incoming(call.notice, rank, engine.model.device) if call.notice else None
                engine.publish(call.version, WeightFile(call.path) if call.path else incoming)
                pipe.send_bytes(pack_message(DONE))
    except (EOFError, ConnectionError):
        os._exit(0)
    except Exception as error:
        # A leader that waits receives the error; one that does not wait sees that the process has ended.
        with contextlib.suppress(OSError):
            pipe.send_bytes(pack_message(f"{type(error).__name__}: {error}"))
        os._exit(FAILED)


def _parts(spec: EngineSpec, rank: int, store: dist.Store) -> dict[str, Any]:
    """Return the arguments of a rank's engine, once it has joined the group."""
    device = torch.device(spec.device)
    if device.type == "cuda":
        # Hide all devices but this rank's, before the process uses CUDA.
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[rank] if seen != [""] else str(rank)
    group = join_group(store, rank, spec.tensor, spec.limit_s, device.type == "cuda", LOOPBACK)
    model, slices = load_for_decoding(spec.model, getattr(torch, spec.dtype), device, TensorRanks(group))
    return {
        "model": model, "tokenizer": load_tokenizer(spec.model), "slots": spec.slots,
        "max_sequence_tokens": spec.max_sequence_tokens, "seed": spec.seed, "slices": slices, **spec.options,
    }  # fmt: skip
