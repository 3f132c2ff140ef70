"""Verification by rules, and selection, while other rows still generate; the verify stage collects the results.

engine ──finished rows──▶ EarlyChecks ──some at a time──▶ Checks.begin ─▶ reward processes
                                       verify stage ──▶ Checks.results ◀──┘

Early stop aborts groups that the batch no longer needs. Each rank decides its groups, and ranks sum how many are kept
before the first undecided one:

finished rows ──▶ checks ──▶ whole groups ──select──▶ kept or not ──▶ first undecided, kept before it
                    │  ▲                                                      │
                    ▼  │ rows of groups that are on several ranks             Rounds ──▶ enough? end all rows
           rank of the group's first sample

Which rows are aborted depends on timing. The batch does not: it is the first kept groups by number.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from braidrl.agents.trajectory import response_columns
from braidrl.cluster.process_groups import has_message, message_at, put_message
from braidrl.cluster.rounds import NOTHING_LEFT, Rounds, RoundTotals
from braidrl.cluster.world import Ranks, World
from braidrl.data.codec import pack_rows, unpack_rows
from braidrl.data.rows import IDENTITY, Column, Rows, Uid
from braidrl.engines.requests import Changes, Response
from braidrl.engines.routing.router import RoleEngine
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.columns import ADMISSION
from braidrl.flow.compute import dropped
from braidrl.flow.signatures import SUMMED, in_namespace
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Bar, Progress
from braidrl.observe.stalls import WORK
from braidrl.rewards.verify import Pending, RuleRewards, Scores
from braidrl.runtimes.generating.loans import Loans

ONE_RANK = Ranks()
VERIFY_CHUNK = 32
"""Batch size of finished rows for the reward processes during generation."""


class Checks:
    """The running checks, by verify stage.

    Without `rewards` this process makes none.
    """

    def __init__(self, rewards: RuleRewards | None, progress: Progress) -> None:
        self.rewards, self.progress = rewards, progress
        self.pending: dict[str, list[tuple[Rows, Pending]]] = {}
        self.lock = threading.Lock()
        self.shown: set[tuple[str, str]] = set()
        self.left_out = set[Uid]()
        """Rows that are not checked: engines have ended with them."""

    def begin(self, stage: Stage, rows: Rows) -> Pending:
        """Send rows to the reward processes before the stage runs."""
        assert self.rewards is not None, "no answer is checked in this process"
        started = self.rewards.submit(rows, stage.params.get("of"), self.left_out)
        self.pending.setdefault(stage.name, []).append((rows, started))
        return started

    def results(self, stage: Stage, rows: Rows, sums: Sums) -> Rows:
        """Return the results of `rows`, in their order; missing checks start now.

        Thread-safe.
        """
        uids = set(rows.uids())
        with self.lock:
            if not any(uids.issuperset(part.uids()) for part, _ in self.pending.get(stage.name, ())):
                self.begin(stage, rows)
            batches = self.pending.pop(stage.name)
            started = [(part, pending) for part, pending in batches if uids.issuperset(part.uids())]
            if len(started) < len(batches):
                self.pending[stage.name] = [batch for batch in batches if not uids.issuperset(batch[0].uids())]
        with self.progress.stage(stage.name, len(rows)) as bar:
            parts = []
            for part, pending in started:
                with WORK.waiting():  # checks have separate limits
                    columns = pending.result(scores_of(stage))
                parts.append(part.only(IDENTITY).with_columns(columns))
                bar.update(len(part))
                for kind, words in pending.count(scores_of(stage), sums).items():
                    if kind not in self.shown:  # later failures of the same kind are only counted
                        self.shown.add(kind)
                        self.progress.print(f"{words}; its row counts as wrong")
        checked = Rows.cat(parts)
        position = {uid: i for i, uid in enumerate(checked.uids())}
        return checked.take([position[uid] for uid in rows.uids()]).without(IDENTITY)


@dataclass(frozen=True)
class Segment:
    """A flow's sampling segment whose groups can be decided one by one from generated and rule-checked columns."""

    generate: Stage
    verify: tuple[Stage, ...]
    select: tuple[Stage, ...]
    target: int
    """Number of groups of the batch."""
    kept: tuple[int, ...] = ()
    """The groups that are already kept."""

    def is_enough(self, kept: int, undecided: int) -> bool:
        """Return True if the batch is known: all groups before the first undecided one are decided, and enough of them,
        `kept` in this wave, are kept.
        """
        return kept + sum(group < undecided for group in self.kept) >= self.target


def segment_of(flow: Flow, iteration: int, target: int, kept: Sequence[int] = ()) -> Segment | None:
    """Return the flow's sampling segment; None if selection needs other columns than those of rule checks, or if stages
    are skipped.
    """
    if not flow.sampling_segment:
        return None
    generate, *rest = flow.sampling_segment
    verify = tuple(stage for stage in rest if stage.type == "verify")
    select = tuple(stage for stage in rest if stage.kind is Kind.SELECT)
    plain = generate.kind is Kind.GENERATE and not {"into", "environment", "greedy"} & generate.params.keys()
    simple = len(verify) + len(select) == len(rest) and set(verify) <= set(early_verify_stages(flow, generate))
    due = all(stage.when.includes(iteration) for stage in flow.sampling_segment)
    return Segment(generate, verify, select, target, tuple(kept)) if plain and simple and due else None


class EarlyStop:
    """One rank's part of a wave: it ends rows early, counts rows over all ranks, lends waiting rows, and keeps the
    order of ranks that play in turn.
    """

    def __init__(
        self,
        segment: Segment | None,
        flow: Flow,
        uids: Sequence[Uid],
        samples: int,
        world: World | None = None,
        wave: int = 0,
    ) -> None:
        """Start a wave, numbered in the same way on all ranks, with this rank's rows `uids` of groups of `samples`
        rows.

        Without a `segment` no row ends early. All ranks of `world` make one; None for one rank.
        """
        self.segment, self.flow, self.samples, self.wave = segment, flow, samples, wave
        self.rounds = None if world is None or world.size == 1 else Rounds(world)
        self.mail = None if world is None else world.mail
        self.loans = None if world is None or world.size == 1 else Loans(world, wave)
        self.is_over, self.is_interrupted = False, False
        """Whether no further row is needed; whether a rank has left its rows."""
        self.left: dict[int, set[Uid]] = {}
        """Unfinished rows by group."""
        for uid in uids:
            self.left.setdefault(uid[1], set()).add(uid)
        self.undecided = {uid[1] for uid in uids if uid[2] == 0} if segment is not None else set[int]()
        """The groups that this rank decides: those whose first sample it has."""
        self.awaited = {
            group: [uid for uid in ((*next(iter(local))[:2], n) for n in range(samples)) if uid not in local]
            for group, local in self.left.items()
            if group in self.undecided and len(local) < samples
        }
        """Rows of those groups that are on other ranks."""
        self.waiting: list[tuple[Rows, list[Pending]]] = []
        """Finished rows, and their checks in the order of the verify stages."""
        self.collected: dict[int, list[Rows]] = {}
        self.kept: list[int] = []
        self.before = -1
        """The first undecided group of all ranks in the last round."""
        self.counted, self.posted = (0, 0, len(uids)), (0, 0, len(uids))
        """Finished rows, their tokens and all rows of this rank: now, and as the other ranks know them."""
        self.turn = NOTHING_LEFT
        self.bar: Bar | None = None
        self.is_closed = self.left_rows = False

    def add(self, rows: Rows, checks: Mapping[str, Pending]) -> None:
        """Add finished rows, and their running checks by verify stage."""
        if self.segment is not None:
            self.waiting.append((rows, [checks[stage.name] for stage in self.segment.verify]))

    def count(self, tokens: int) -> None:
        """Count a finished row, and show the progress of all ranks."""
        rows, before, total = self.counted
        self.counted = rows + 1, before + tokens, total
        if self.segment is None and (self.loans is None or self.loans.engine is None):
            self.rows_to_end()

    def changes(self) -> Changes:
        """Return the changes for this rank's engine. Never waits for another rank."""
        ended = self.rows_to_end()
        if self.loans is None:
            return Changes(ended)
        return self.loans.changes(ended, self.is_over or self.is_interrupted)

    def rows_to_end(self) -> list[Uid]:
        """Return this rank's rows if no group is needed any more; some may have ended. Never waits."""
        news = self._decide(wait=False)
        if self.rounds is not None:
            totals = self.rounds.ended()
            is_enough = totals is not None and self._take(totals)
            self.rounds.join(*self._numbers())
        else:
            # A single rank needs no round.
            self.before = min(self.undecided, default=NOTHING_LEFT)
            is_enough = self.segment is not None and news and self.segment.is_enough(self._certain(), self.before)
        self.is_over = self.is_over or is_enough
        return [uid for group in sorted(self.left) for uid in sorted(self.left[group])] if is_enough else []

    def wait_for_turn(self, at_once: int, decoding: Ranks = ONE_RANK) -> None:
        """Wait until every rank with an earlier turn has left; `at_once` ranks share a turn.

        Ranks that are `decoding` together have the turn of the first of them.
        """
        if self.rounds is None or self.rounds.world.size <= at_once:
            return
        together = min(decoding.size, at_once)
        self.turn = decoding.members(self.rounds.world.rank)[0] // (at_once // together * together)
        least = -1
        while least < self.turn:
            totals = self.rounds.wait(*self._numbers())
            least = totals.least
            self._take(totals)

    def close(self, complete: bool = True) -> None:
        """Report the remaining results and wait for the other ranks, after all rows of this rank have ended.

        Without `complete` some rows have not ended, and there are no results.
        """
        if self.is_closed:
            return
        self.is_closed, self.turn, self.left_rows = True, NOTHING_LEFT, not complete
        if self.loans is not None:
            self.loans.close()
        self._decide(wait=complete)
        if self.rounds is not None and (totals := self.rounds.ended(wait=True)) is not None:
            self._take(totals)
            self._decide(wait=False)
        while self.rounds is not None and (totals := self.rounds.leave(*self._numbers())) is not None:
            self._take(totals)
            self._decide(wait=False)
        if self.loans is not None:
            self.loans.clear_mail()

    def _numbers(self) -> tuple[int, tuple[int, ...]]:
        """Return this rank's numbers for a round.

        These are its turn or first undecided group, the groups kept before the last round's minimum, rows, tokens,
        whether it has left its rows, waiting rows and free slots.
        """
        self.posted = self.counted
        shared = self.loans.numbers() if self.loans is not None else ()
        least = min(self.undecided, default=self.turn)
        return least, (self._certain(), *self.counted, int(self.left_rows), *shared)

    def _certain(self) -> int:
        """Return how many of this rank's kept groups are before the first undecided one of all ranks."""
        return sum(group < self.before for group in self.kept)

    def _take(self, totals: RoundTotals) -> bool:
        """Process the totals of a round; return True if no further row is needed."""
        certain, *counts = totals.sums[:4]
        left, *shared = totals.sums[4:]
        self.is_interrupted = left > 0
        if self.loans is not None:
            self.loans.take(shared)
        is_enough = self.segment is not None and self.segment.is_enough(certain, self.before)
        self.before = totals.least
        if self.bar is not None:
            rows, tokens, total = (total - ours for total, ours in zip(counts, self.posted, strict=True))
            self.bar.show_others(rows, tokens, total)
        return is_enough

    def _decide(self, wait: bool) -> bool:
        """Decide the groups whose rows are all checked, with `wait` all of this rank's groups; return True if new ones
        were decided.
        """
        ready = [wait or all(check.done() for check in checks) for _, checks in self.waiting]
        finished = [item for item, now in zip(self.waiting, ready, strict=True) if now]
        self.waiting = [item for item, now in zip(self.waiting, ready, strict=True) if not now]
        for rows, checks in finished:
            assert self.segment is not None
            for stage, check in zip(self.segment.verify, checks, strict=True):
                rows = rows.with_columns(verified(self.flow, stage, rows, check.result(scores_of(stage))))
            for number, uid in enumerate(rows.uids()):
                self.left[uid[1]].discard(uid)
                row = rows.index.take([number])
                if uid[1] in self.undecided:
                    self.collected.setdefault(uid[1], []).append(row)
                elif self.mail is not None:
                    put_message(self.mail, self._key(uid), bytes(pack_rows(row)))
        self._collect()
        complete = [group for group, rows in self.collected.items() if len(rows) == self.samples]
        for group in complete:
            assert self.segment is not None
            rows = Rows.cat(self.collected.pop(group))
            self.undecided.discard(group)
            if not any(dropped(stage, rows) for stage in self.segment.select):
                self.kept.append(group)
        return bool(complete)

    def _collect(self) -> None:
        """Receive rows of this rank's groups from other ranks, once all rows of a group have arrived."""
        for group in list(self.awaited):
            keys = [self._key(uid) for uid in self.awaited[group]]
            assert self.mail is not None
            if len(self.collected.get(group, ())) + len(keys) == self.samples and has_message(self.mail, *keys):
                del self.awaited[group]
                for key in keys:
                    self.collected[group].append(unpack_rows(message_at(self.mail, key, bytes)))
                    self.mail.delete_key(key)

    def _key(self, uid: Uid) -> str:
        return f"{self.wave}/{uid[1]}/{uid[2]}"


class EarlyChecks:
    """Sends finished rows of a generate stage to the reward processes while the engine continues."""

    def __init__(
        self,
        checks: Checks,
        engine: RoleEngine,
        rows: Rows,
        positions: Mapping[Uid, int],
        verify: Sequence[Stage],
        bar: Bar,
        stop: EarlyStop | None,
    ) -> None:
        """Start without rows; `positions` is each row's position in `rows`, and `verify` the stages that may start
        early.

        `stop` gets each finished row.
        """
        self.checks, self.engine, self.rows, self.place, self.bar = checks, engine, rows, positions, bar
        self.verify = verify if checks.rewards is not None else ()
        for stage in self.verify:
            # The remaining ones belong to rows that ended early with their group and never reached the stage.
            checks.pending.pop(stage.name, None)
        self.stop, self.chunk = stop, VERIFY_CHUNK if stop is None or stop.segment is None else 1
        self.waiting: list[Response] = []

    def add(self, finished: Response) -> None:
        """Add a finished row of the engine; called in the order in which rows end."""
        self.bar.update(1, len(finished.tokens), self.engine.in_flight)
        if self.stop is not None:
            self.stop.count(len(finished.tokens))
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
        for verify in takewhile(lambda later_stage: later_stage.kind is not Kind.INFER, later)
        if verify.type == "verify"
        and "of" not in verify.params
        and {stage.name} <= {column.writer for column in flow.inputs[verify.name]} <= {stage.name, ADMISSION}
    ]


def scores_of(stage: Stage) -> Scores:
    """Return a verify stage's scores of a right and of a wrong answer."""
    return stage.params["correct_score"], stage.params["wrong_score"]


def verified(flow: Flow, stage: Stage, rows: Rows, checked: Mapping[str, Column]) -> Mapping[str, Column]:
    """Return the columns that a verify stage writes for `rows`, from the results of its checks."""
    scores = checked[in_namespace(stage.params.get("of"), ("score",))[0]]
    assert isinstance(scores, Tensor)
    return {**checked, **added_scores(flow, stage, rows, scores)}


def added_scores(flow: Flow, stage: Stage, rows: Rows, scores: Tensor) -> Mapping[str, Column]:
    """Return `score` and `reward`: scores (B,) times the stage's weight, added to earlier sources."""
    earlier, weight = {column.name for column in flow.inputs.get(stage.name, ())}, stage.params.get("weight")
    weighted = scores.float() * (1.0 if weight is None else weight)
    columns = in_namespace(stage.params.get("of"), SUMMED)
    return {name: rows[name] + weighted if name in earlier else weighted for name in columns}
