"""The control plane's cost per row before stages ran with the trainer: each was a consumer. For `rate.py --against`."""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


def control_cost(flow: Any, rows: int, samples: int) -> float:
    """Return the microseconds that the control plane needs per row to answer idle workers, without sockets.

    An engine takes and gives back 64 rows at a time; a compute worker and a trainer do so too. The last step publishes the version.
    """
    from braidrl.data.codec import decode, encode
    from braidrl.data.rows import Objects, Rows
    from braidrl.flow.batches import Sizes
    from braidrl.queue.owner import StorageNode
    from braidrl.queue.table import Block
    from braidrl.runtimes.streaming.control import ControlPlane
    from braidrl.runtimes.streaming.stream import Stream

    spent = 0.0
    node = StorageNode("here", "127.0.0.1")
    control = ControlPlane(Stream(flow, Sizes(1, rows // samples, samples, rows)), node.data, 600.0)

    def timed(call: Any) -> Any:
        nonlocal spent
        start = time.thread_time()
        found = call()
        spent += time.thread_time() - start
        return found

    def ask(request: str, frames: Any = (), **fields: Any) -> Any:
        return timed(lambda: control.handle({"request": request, "held": [], **fields}, frames))

    try:
        for holder in ("engine.0.0", "compute.0.0", "trainer.0.0"):
            ask("hello", holder=holder, address=node.data.address, generates=holder.startswith("engine"))
        control.allowed = 1
        timed(lambda: control.training.schedule.groups_wanted(0))
        numbers = torch.arange(rows)
        born: Any = Rows(
            {
                "source": torch.zeros(rows, dtype=torch.int64), "group": numbers // samples, "sample": numbers % samples,
                "prompt_length": torch.full((rows,), 4), "metadata": Objects(({},) * rows),
            }
        )  # fmt: skip
        if find_spec("braidrl.runtimes.streaming.rows"):
            born = import_module("braidrl.runtimes.streaming.rows").stored(node.data, born)
        timed(lambda: control.admit(control.training, born))
        names = [stage.name for stage in flow.stages]
        columns_of = [
            {"version": torch.zeros, "length": torch.ones},
            {"score": torch.ones},
            {"advantage": torch.ones},
            {},
        ]
        written = dict(zip(names, columns_of, strict=True))
        work = {"engine.0.0": names[:1], "compute.0.0": names[1:3], "trainer.0.0": names[3:]}
        block = Block("here", node.data.address, "braid-0-nothing-0", 8)
        while not control.finished:
            for holder, stages in work.items():
                single = holder.startswith("engine")
                answer = ask("take", holder=holder, stages=stages, most=64, single=single, whole=[], ranks=1)
                if not isinstance(answer[0], dict):
                    continue
                if answer[0]["kind"] == "step":
                    ask("stepped", holder=holder, stage=names[3], report={"sums": [], "stage": names[3]})
                if answer[0]["kind"] != "rows":
                    continue
                index, stage = decode(list(answer[1])), answer[0]["stage"]
                columns = {name: make(len(index), dtype=torch.int64) for name, make in written[stage].items()}
                frames = [bytes(frame) for frame in encode(Rows(columns))] if columns else []
                payload = ["tokens"] if stage == names[0] else []
                part = {
                    "uids": [list(uid) for uid in index.uids()], "block": block if payload else None, "columns": payload,
                    "frames": [0, len(frames)],
                }  # fmt: skip
                ask(
                    "done", frames, holder=holder, stage=stage, leases=[number for number, _ in answer[0]["leases"]],
                    parts=[part] if columns else [], totals={}, report={"sums": [], "stage": stage},
                )  # fmt: skip
        return spent / rows * 1e6
    finally:
        node.close()
