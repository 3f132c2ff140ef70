"""What a worker that asks for a stage is given to do, by the schedule of the stage's stream.

give weights │ make an optimizer step │ rows, under leases │ nothing
"""

from __future__ import annotations

import math
import time
from typing import Any

from braidrl.data.codec import encode
from braidrl.flow import Kind, Stage
from braidrl.flow.flow import is_optimized
from braidrl.transfer.leases import Lease
from braidrl.transfer.queue.messages import Answer
from braidrl.transfer.queue.stream import Stream
from braidrl.transfer.queue.versions import Copies


class Assignments:
    """Belongs to the control plane, under whose lock it is asked."""

    def __init__(self, training: Stream, copies: Copies, lease_s: float) -> None:
        self.training, self.copies, self.lease_s = training, copies, lease_s
        self.allowed = 0
        """The last iteration whose optimizer steps may be made."""
        self.stepping: set[str] = set()
        """Train stages whose step is under way."""

    def next(self, stream: Stream, stage: Stage, request: dict[str, Any], version: int | None) -> Answer | None:
        """What there is to do for a stage, for an engine that holds `version` of the weights; None while there is nothing."""
        if (wanted := self._copy_from(stage)) is not None:
            self.copies.ask(wanted, request["holder"])
            return {"kind": "give", "stage": wanted}, ()
        if stage.kind is Kind.TRAIN and stage.name in stream.schedule.due_steps():
            return self._step(stream, stage)
        leases = self._leases(stream, stage, request, version if stream is self.training else None)
        if not leases:
            return None
        uids = [uid for lease in leases for uid in lease.rows]
        index, payload = stream.read(stage.name, uids)
        iteration = stream.schedule.iteration_of[uids[0][1]] if stream.during is None else stream.during
        numbers = [[lease.number, len(lease.rows)] for lease in leases]
        answer = {
            "kind": "rows", "stage": stage.name, "iteration": iteration, "leases": numbers, "payload": payload,
            "state": stream.states.values.get(stage.name, {}),
        }  # fmt: skip
        return answer, encode(index)

    def stepped(self, name: str) -> None:
        """A train stage's step is made."""
        self.stepping.discard(name)

    def _step(self, stream: Stream, stage: Stage) -> Answer | None:
        schedule = stream.schedule
        iteration = schedule.published + 1
        if iteration > self.allowed or stage.name in self.stepping:
            return None
        answer = {"kind": "step", "stage": stage.name, "iteration": iteration}
        if not is_optimized(stage):
            if (weights := self.copies.given(stage.name)) is None:
                return None
            self.stepping.add(stage.name)
            return {**answer, "weights": weights}, ()
        self.stepping.add(stage.name)
        index, _ = stream.read(stage.name, schedule.batches[iteration].updates[stage.name][0].rows)
        return answer, encode(index)

    def _copy_from(self, stage: Stage) -> str | None:
        """The update that is due and waits for the weights that whoever does this stage has."""
        schedule, flow = self.training.schedule, self.training.flow
        if stage.kind not in (Kind.INFER, Kind.TRAIN) or schedule.published + 1 > self.allowed:
            return None
        due = [flow[name] for name in schedule.due_steps() if name not in self.copies]
        return next((copy.name for copy in due if copy.params.get("source", "") == stage.role), None)

    def _leases(self, stream: Stream, stage: Stage, request: dict[str, Any], version: int | None) -> list[Lease]:
        # What a trainer has accumulated cannot be taken back: it keeps its rows until it is known to be dead.
        seconds = math.inf if stage.kind is Kind.TRAIN else self.lease_s
        most, found = request["most"], []
        for _ in range(most if request["single"] else 1):
            lease = stream.schedule.take(
                stage.name, request["holder"], time.monotonic(), seconds, 1 if request["single"] else most,
                stage.name in request["whole"], version,
            )  # fmt: skip
            if lease is None:
                break
            found.append(lease)
        return found
