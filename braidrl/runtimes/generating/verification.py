"""Verification by rules, and selection, while other rows still generate; the verify stage collects the results.

engine ──finished rows──▶ EarlyChecks ──some at a time──▶ Checks.begin ─▶ reward processes
                                       verify stage ──▶ Checks.results ◀──┘

Early stop aborts groups that the batch turns out not to need:

finished rows ──▶ checks ──▶ whole groups ──select──▶ kept or not ──▶ GroupSelector.needless ──▶ rows to abort
                   │  ▲
                   ▼  │ index columns
                other ranks

Which rows are aborted depends on timing. The batch does not: it is the first kept groups by number.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from braidrl.agents.trajectory import response_columns
from braidrl.cluster.world import Notices
from braidrl.data.codec import pack_rows, unpack_rows
from braidrl.data.rows import IDENTITY, Column, Rows, Uid
from braidrl.engines.requests import Response
from braidrl.engines.routing.router import RoleEngine
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.columns import ADMISSION
from braidrl.flow.compute import dropped
from braidrl.flow.signatures import SUMMED, in_namespace
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Bar, Progress
from braidrl.observe.stalls import WORK
from braidrl.rewards.verify import Pending, RuleRewards, Scores

Needless = Callable[[Mapping[int, bool]], Collection[int]]
"""Returns the groups that are no longer needed once these groups are known to be kept or dropped."""
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
        started = self.rewards.submit(rows, stage.params.get("of"))
        self.pending.setdefault(stage.name, []).append((rows, started))
        return started

    def results(self, stage: Stage, rows: Rows, sums: Sums) -> Rows:
        """Return the results of `rows`, in their order; missing checks start now.

        Several threads may ask for theirs.
        """
        uids = set(rows.uids())
        with self.lock:
            if not any(uids.issuperset(part.uids()) for part, _ in self.pending.get(stage.name, ())):
                self.begin(stage, rows)
            known = self.pending.pop(stage.name)
            started = [(part, pending) for part, pending in known if uids.issuperset(part.uids())]
            if len(started) < len(known):
                self.pending[stage.name] = [one for one in known if not uids.issuperset(one[0].uids())]
        with self.progress.stage(stage.name, len(rows)) as bar:
            parts = []
            for part, pending in started:
                with WORK.waiting():  # checks have their own limits
                    found = pending.result(scores_of(stage))
                parts.append(part.only(IDENTITY).with_columns(found))
                bar.update(len(part))
                for kind, words in pending.count(scores_of(stage), sums).items():
                    if kind not in self.shown:  # later ones of the same kind are only counted
                        self.shown.add(kind)
                        self.progress.print(f"{words}; its row counts as wrong")
        checked = Rows.cat(parts)
        place = {uid: i for i, uid in enumerate(checked.uids())}
        return checked.take([place[uid] for uid in rows.uids()]).without(IDENTITY)


@dataclass(frozen=True)
class Segment:
    """A flow's sampling segment whose groups can be decided one by one from generated and rule-checked columns."""

    generate: Stage
    verify: tuple[Stage, ...]
    select: tuple[Stage, ...]
    needless: Needless


def segment_of(flow: Flow, iteration: int, needless: Needless) -> Segment | None:
    """Return the flow's sampling segment, or None if selection needs more than rules see, or if stages are skipped."""
    if not flow.sampling_segment:
        return None
    generate, *rest = flow.sampling_segment
    verify = tuple(stage for stage in rest if stage.type == "verify")
    select = tuple(stage for stage in rest if stage.kind is Kind.SELECT)
    plain = generate.kind is Kind.GENERATE and not {"into", "environment", "greedy"} & generate.params.keys()
    simple = len(verify) + len(select) == len(rest) and set(verify) <= set(early_verify_stages(flow, generate))
    due = all(stage.when.includes(iteration) for stage in flow.sampling_segment)
    return Segment(generate, verify, select, needless) if plain and simple and due else None


class EarlyStop:
    """The state of one wave during generation; each rank that shares it has one, with all of the wave's groups."""

    def __init__(
        self, segment: Segment, flow: Flow, uids: Sequence[Uid], notices: Notices | None = None, wave: int = 0
    ) -> None:
        """Start a wave, of a number new on all ranks, with its rows `uids` on all ranks that exchange `notices`; None
        for one rank.
        """
        self.segment, self.flow, self.notices = segment, flow, notices
        if notices is not None:
            notices.begin(str(wave))
        self.left: dict[int, set[Uid]] = {}
        """Unfinished rows by group."""
        for uid in uids:
            self.left.setdefault(uid[1], set()).add(uid)
        self.waiting: list[tuple[Rows, list[Pending]]] = []
        """Finished rows, and their checks in the order of the verify stages."""
        self.known: dict[int, list[Rows]] = {}
        self.decided: dict[int, bool] = {}

    def add(self, rows: Rows, checks: Mapping[str, Pending]) -> None:
        """Add finished rows, and their running checks by verify stage."""
        self.waiting.append((rows, [checks[stage.name] for stage in self.segment.verify]))

    def rows_to_end(self) -> list[Uid]:
        """Return the rows of groups no longer needed; some may have ended, or belong to another rank. Never waits."""
        news = self._news(wait=False)
        for index in news:
            for number, uid in enumerate(index.uids()):
                group = uid[1]
                self.left[group].discard(uid)
                self.known.setdefault(group, []).append(index.take([number]))
                if not self.left[group]:
                    whole = Rows.cat(self.known.pop(group))
                    self.decided[group] = not any(dropped(stage, whole) for stage in self.segment.select)
        needless = self.segment.needless(self.decided) if news else ()
        return [uid for group in needless for uid in sorted(self.left[group])]

    def close(self) -> None:
        """Send the remaining results to the other ranks, after all rows of this rank have ended; waits for their
        checks.
        """
        if self.notices is not None:
            self._news(wait=True)

    def _news(self, wait: bool) -> list[Rows]:
        """Return new results, with columns of verify stages: of this rank's checked rows (with `wait` of all), and of
        others.
        """
        ready = [wait or all(check.done() for check in checks) for _, checks in self.waiting]
        taken = [item for item, now in zip(self.waiting, ready, strict=True) if now]
        self.waiting = [item for item, now in zip(self.waiting, ready, strict=True) if not now]
        own = []
        for rows, checks in taken:
            for stage, check in zip(self.segment.verify, checks, strict=True):
                rows = rows.with_columns(verified(self.flow, stage, rows, check.result(scores_of(stage))))
            own.append(rows.index)
        if self.notices is None:
            return own
        if own:
            self.notices.tell(pack_rows(Rows.cat(own)))
        return [unpack_rows(message) for message in self.notices.hear()]


class EarlyChecks:
    """Sends finished rows of a generate stage to the reward processes while the engine continues."""

    def __init__(
        self,
        checks: Checks,
        engine: RoleEngine,
        rows: Rows,
        place: Mapping[Uid, int],
        verify: Sequence[Stage],
        bar: Bar,
        stop: EarlyStop | None,
    ) -> None:
        """Start; `place` is each row's position in `rows`, and `verify` the stages that may start early. `stop` gets
        each finished row.
        """
        self.checks, self.engine, self.rows, self.place, self.bar = checks, engine, rows, place, bar
        self.verify = verify if checks.rewards is not None else ()
        for stage in self.verify:
            # Those left belong to rows that ended early with their group and never reached the stage.
            checks.pending.pop(stage.name, None)
        self.stop, self.chunk = stop, VERIFY_CHUNK if stop is None else 1
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
        started = {stage.name: self.checks.begin(stage, part) for stage in self.verify}
        if self.stop is not None:
            self.stop.add(part, started)


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


def scores_of(stage: Stage) -> Scores:
    """Return a verify stage's scores of a right and of a wrong answer."""
    return stage.params["correct_score"], stage.params["wrong_score"]


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
