"""The optimizer steps of the coming batch: which trainer may make one, and the source weights of EMA and copy updates.

TakeWork ──▶ may_step (rows, other workers) ─▶ allowed by the main process? ──▶ Step ─▶ stepped
EMA, copy    Give to a worker of the source role ──▶ weights_given: their location ──▶ Step with these weights
"""

from collections.abc import Collection
from dataclasses import dataclass

from braidrl.flow.flow import is_optimized
from braidrl.flow.stage import Stage
from braidrl.runtimes.streaming.stream import Stream
from braidrl.runtimes.streaming.work import Give, Step, TakeWork, WeightLocation, WeightsGiven


@dataclass
class Copy:
    """Source weights of an EMA or copy update: the worker that gives them, and their location once written."""

    giver: str
    location: WeightLocation | None = None


class StepPermits:
    """The steps in progress, and those that the main process allows."""

    def __init__(self, exported: Collection[str]) -> None:
        """Start without steps; the weights of `exported` roles are published after their last step of an iteration."""
        self.exported = frozenset(exported)
        self.allowed = 0
        """The last iteration whose optimizer steps are allowed."""
        self.is_due = False
        """True if a trainer could make a step that is not allowed yet."""
        self.in_progress: set[str] = set()
        """Train stages with a step in progress."""
        self.copies: dict[str, Copy] = {}
        """The source weights of due updates without a loss, by train stage."""
        self.outdated: list[int] = []
        """Versions that trainers may free with their next step."""

    def allow(self, iteration: int) -> None:
        """Allow the optimizer steps of an iteration."""
        self.allowed, self.is_due = iteration, False

    def next_for(self, request: TakeWork, training: Stream) -> Step | Give | None:
        """Return the step that a trainer may make, or an order to give its weights to another role; or None."""
        progress, role = training.schedule.progress, request.role
        if role is None:
            return None
        trainers = training.consumers.trainers
        copies = [(s, c.takes_rows) for c in trainers for s in c.updates if not is_optimized(s)]
        for stage in [s for s, _ in copies if s.params["source"] == role and s.name not in self.copies]:
            if progress.may_step(stage) and self._is_allowed(progress.published + 1):
                self.copies[stage.name] = Copy(request.holder)
                return Give(stage=stage.name)
        # A worker that only copies weights is always ready.
        without_rows = [stage for stage, takes_rows in copies if not takes_rows and stage.role == role]
        for stage in [*without_rows, *map(training.flow.__getitem__, request.ready)]:
            is_free = stage.name not in self.in_progress and progress.may_step(stage)
            if is_free and self._is_allowed(progress.published + 1):
                copy = self.copies.get(stage.name)
                if is_optimized(stage) or (copy and copy.location):
                    return self._step(stage, copy.location if copy else None, training)
        return None

    def _is_allowed(self, iteration: int) -> bool:
        self.is_due = self.is_due or iteration > self.allowed
        return iteration <= self.allowed

    def _step(self, stage: Stage, weights: WeightLocation | None, training: Stream) -> Step:
        """Start a step; after the role's last step of the iteration its weights are published."""
        progress, role = training.schedule.progress, str(stage.role)
        iteration = progress.published + 1
        batch = progress.batches[iteration]
        is_last = not is_optimized(stage) or batch.steps - batch.steps_made[stage.name] <= 1
        updates = [s.name for s in training.updates_of(role, iteration) if s.name != stage.name]
        is_last = is_last and all(progress.is_through(name, batch) for name in updates)
        outdated, self.outdated = self.outdated, []
        self.in_progress.add(stage.name)
        return Step(
            stage=stage.name,
            iteration=iteration,
            export=iteration if is_last and role in self.exported else None,
            is_last=is_last,
            outdated=outdated,
            weights=weights,
        )

    def stepped(self, stage: str) -> list[WeightLocation]:
        """End a step; return the source weights to free."""
        self.in_progress.discard(stage)
        copy = self.copies.pop(stage, None)
        return [copy.location] if copy and copy.location else []

    def weights_given(self, given: WeightsGiven) -> list[WeightLocation]:
        """Record the location of source weights; return it if another worker has replaced the giver."""
        copy = self.copies.get(given.stage)
        if copy is None or copy.giver != given.holder:
            return [given.location]
        copy.location = given.location
        return []

    def leave(self, holder: str) -> None:
        """Request weights that a lost worker has not written from another one."""
        self.copies = {name: c for name, c in self.copies.items() if c.giver != holder or c.location is not None}

    def restart(self) -> list[WeightLocation]:
        """Forget all steps in progress; return the source weights to free."""
        copies, self.copies, self.is_due = self.copies, {}, False
        self.in_progress.clear()
        return [copy.location for copy in copies.values() if copy.location]
