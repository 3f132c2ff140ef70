"""Verification by rules: starts on finished rows while others still generate; the verify stage collects the results.

engine ──finished rows──▶ EarlyChecks ──some at a time──▶ Checks.begin ─▶ reward processes
                                       verify stage ──▶ Checks.results ◀──┘
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from torch import Tensor

from braidrl.agents.trajectory import response_columns
from braidrl.data.rows import IDENTITY, Column, Rows, Uid
from braidrl.engines.engine import RoleEngine
from braidrl.engines.requests import Response
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.columns import ADMISSION
from braidrl.flow.signatures import SUMMED, in_namespace
from braidrl.observe.metrics import FAILURE, Sums
from braidrl.observe.progress import Bar, Progress
from braidrl.observe.stalls import WORK
from braidrl.rewards.verify import Pending, RuleRewards

Tell = Callable[[Rows, Mapping[str, Pending]], object]
NOTED = 3
"""Number of failure messages kept from some rows: the most frequent."""
VERIFY_CHUNK = 8
"""Batch size of finished rows for the reward processes during generation."""


class Checks:
    """The running checks, by verify stage. Without `rewards` this process makes none."""

    def __init__(self, rewards: RuleRewards | None, progress: Progress) -> None:
        self.rewards, self.progress = rewards, progress
        self.pending: dict[str, list[tuple[Rows, Pending]]] = {}
        self.lock = threading.Lock()
        self.shown: set[tuple[str, str]] = set()

    def begin(self, stage: Stage, rows: Rows) -> Pending:
        """Send rows to the reward processes before the stage runs."""
        assert self.rewards is not None, "no answer is checked in this process"
        begun = self.rewards.submit(rows, stage.params.get("of"))
        self.pending.setdefault(stage.name, []).append((rows, begun))
        return begun

    def results(self, stage: Stage, rows: Rows, sums: Sums) -> Rows:
        """Return the results of `rows`, in their order; missing checks start now. Several threads may ask for theirs."""
        uids = set(rows.uids())
        with self.lock:
            if not any(uids.issuperset(part.uids()) for part, _ in self.pending.get(stage.name, ())):
                self.begin(stage, rows)
            known = self.pending.pop(stage.name)
            begun = [(part, pending) for part, pending in known if uids.issuperset(part.uids())]
            if len(begun) < len(known):
                self.pending[stage.name] = [one for one in known if not uids.issuperset(one[0].uids())]
        with self.progress.stage(stage.name, len(rows)) as bar:
            parts = []
            for part, pending in begun:
                with WORK.waiting():  # checks have their own limits
                    found = pending.result()
                parts.append(part.only(IDENTITY).with_columns(found))
                bar.update(len(part))
                failures = pending.failures()
                for (label, reason), count in Counter((failure.label, failure.reason) for failure in failures).items():
                    sums.add(f"reward/failures/{label}/{reason}", count)
                for name, value in pending.metrics():
                    sums.add(name, value)
                sums.add("reward/failed_fraction", len({failure.row for failure in failures}), len(part))
                for words, count in Counter(failure.words for failure in failures).most_common(NOTED):
                    sums.add(FAILURE + words, 0.0, count)
                for failure in failures:
                    kind = (failure.label, failure.reason)
                    if kind not in self.shown:  # later ones of the same kind are only counted
                        self.shown.add(kind)
                        self.progress.print(f"{failure.words}; its row counts as wrong")
        checked = Rows.cat(parts)
        place = {uid: i for i, uid in enumerate(checked.uids())}
        return checked.take([place[uid] for uid in rows.uids()]).without(IDENTITY)


class EarlyChecks:
    """Sends finished rows of a generate stage to the reward processes while the engine continues."""

    def __init__(
        self, checks: Checks, engine: RoleEngine, rows: Rows, place: Mapping[Uid, int], verify: Sequence[Stage],
        bar: Bar, tell: Tell | None,
    ) -> None:  # fmt: skip
        """Start; `place` gives the position of each row in `rows`, `verify` the stages that may start early.

        `tell` gets each finished row at once, with its checks by verify stage.
        """
        self.checks, self.engine, self.rows, self.place, self.bar = checks, engine, rows, place, bar
        self.verify = verify if checks.rewards is not None else ()
        for stage in self.verify:
            # Those left belong to rows that ended early with their group and never reached the stage.
            checks.pending.pop(stage.name, None)
        self.tell, self.chunk = tell, VERIFY_CHUNK if tell is None else 1
        self.waiting: list[Response] = []

    def add(self, finished: Response) -> None:
        """Take a finished row from the engine; called in the order in which rows end."""
        self.bar.update(1, len(finished.tokens), self.engine.in_flight)
        if self.verify:
            self.waiting.append(finished)
            if len(self.waiting) >= self.chunk:
                self.flush()

    def flush(self) -> None:
        """Start the checks of all waiting rows."""
        if not self.waiting:
            return
        part = self.rows.take([self.place[row.uid] for row in self.waiting])
        part = part.with_columns(response_columns(part, self.waiting))
        self.waiting = []
        begun = {stage.name: self.checks.begin(stage, part) for stage in self.verify}
        if self.tell is not None:
            self.tell(part, begun)


def early_verify_stages(flow: Flow, stage: Stage) -> list[Stage]:
    """Return the verify stages that may start during `stage`: they need only its columns and those of admission.

    From the next infer stage on, rows may be on other ranks than those that generated them.
    """
    later = flow.stages[flow.stages.index(stage) + 1 :] if stage in flow.stages else ()
    return [
        verify
        for verify in takewhile(lambda other: other.kind is not Kind.INFER, later)
        if verify.type == "verify"
        and "of" not in verify.params
        and {stage.name} <= {column.writer for column in flow.inputs[verify.name]} <= {stage.name, ADMISSION}
    ]


def verified(flow: Flow, stage: Stage, rows: Rows, checked: Mapping[str, Column]) -> Mapping[str, Column]:
    """Return the columns that a verify stage writes for `rows`, from the results of its checks."""
    found = checked[in_namespace(stage.params.get("of"), ("score",))[0]]
    assert isinstance(found, Tensor)
    return {**checked, **added_scores(flow, stage, rows, found)}


def added_scores(flow: Flow, stage: Stage, rows: Rows, scores: Tensor) -> Mapping[str, Column]:
    """Return `score` and `reward`: scores (B,) times the stage's weight, added to earlier sources."""
    earlier, weight = {column.name for column in flow.inputs.get(stage.name, ())}, stage.params.get("weight")
    weighted = scores.float() * (1.0 if weight is None else weight)
    columns = in_namespace(stage.params.get("of"), SUMMED)
    return {name: rows[name] + weighted if name in earlier else weighted for name in columns}
