"""Which groups make a batch: selection through the whole run, and how many prompts are admitted for it.

    begin ─▶ next_wave ─▶ admit ─▶ (generate, verify, select) ─▶ decide ─▶ enough kept? ─▶ batch, finish
                 ▲                                                              │ no
                 └──────────────────────────────────────────────────────────────┘

Everything is decided by group number, never by who finished first, which would favour short answers: waves are sized by verdicts in
the order of numbers, and the batch is the first kept groups. A flow that selects nothing keeps every group, so that its first wave is
its batch. Where stages overlap, `groups_wanted` admits groups ahead of decisions; which those were changes no batch:

    numbers   0 ... 7 │ 8 ... 13 │ 14 15 16        14 to 16 went ahead of the waves: when the batch is complete they belong to the next
              wave 1  │ wave 2   │ ahead           one, or on-policy their numbers are given out again when the next one begins
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from braidrl.data.rows import Rows
from braidrl.errors import UserError

SURPLUS = "surplus"
STALE = "stale"
UNFINISHED = "unfinished"
"""Not dropped: responses of the group go on in a later batch."""


@dataclass(frozen=True)
class Verdict:
    """What the select stages say of a group: kept if there is no `reason`; `version` is the oldest among its tokens."""

    reason: str | None = None
    version: int = 0
    scores: tuple[float, float] | None = None
    """The lowest and the highest score of its rows, for the message that ends a run without a kept group."""


@dataclass(frozen=True)
class Selection:
    """A finished batch: its groups by number, groups dropped by reason, and what is over.

    `dropped` counts the groups that ended with this batch. `released` names all groups whose rows can be forgotten; some of them
    may still be in work where `surplus` is dropped. `surplus` names the groups that wait for the next batch. Of the groups that were
    admitted ahead, `carried` belong to the next batch, and `returned` are forgotten and their numbers given out again.
    """

    groups: tuple[int, ...]
    dropped: dict[str, int]
    released: tuple[int, ...]
    surplus: tuple[int, ...]
    carried: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()


@dataclass
class GroupSelector:
    """The state of selection through the whole run, from one batch to the next; everything in it is JSON.

    `target` groups make a batch and `epoch_groups` prompts an epoch. Raises UserError for surplus that no batch could train on.
    """

    target: int
    epoch_groups: int
    surplus: Literal["drop", "keep"] = "drop"
    max_staleness: int = 0
    over_sampling: float = 1.0
    """How many times what is missing the first wave of a batch has."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Kept groups from earlier batches, with their versions."""
    pending: list[int] = field(default_factory=list)
    """Groups that were admitted for this batch and not decided."""
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    """Groups of this batch that were decided."""
    barren: dict[str, int] = field(default_factory=dict)
    """Groups dropped since one was last kept, by reason."""
    barren_scores: tuple[float, float] | None = None
    """The lowest and the highest score in these groups."""
    judged: int = -1
    """The largest group number that `barren` has counted."""
    admitted: int = -1
    """The largest group number admitted."""
    expired: tuple[int, ...] = ()
    """Surplus that became too old when this batch began."""
    is_open: bool = False
    """Whether a batch has begun and is not finished."""
    observed: tuple[int, int] | None = None
    """How many groups were kept for the batch before this one, and how many were decided; None in the first."""

    def __post_init__(self) -> None:
        if self.target < 1 or self.epoch_groups < 1:
            raise ValueError(f"a batch and an epoch have at least one group, got {self.target} and {self.epoch_groups}")
        if self.surplus == "keep" and self.max_staleness < 1:
            raise UserError(
                "trainer.surplus=keep trains surplus groups one version late, which trainer.max_staleness=0 forbids; "
                "write trainer.max_staleness=1 or trainer.surplus=drop"
            )

    def begin(self, version: int) -> None:
        """Start a batch that will be trained on `version`; surplus that would be too old is dropped as `stale`."""
        if self.is_open:
            raise ValueError("the batch before this one is not finished")
        self.is_open = True
        self.expired = tuple(g for g, made in sorted(self.waiting.items()) if version - made > self.max_staleness)
        for group in self.expired:
            del self.waiting[group]

    def next_wave(self) -> int:
        """Return the groups to admit now: 0 while some are undecided and when enough are kept.

        First as many as are missing, or `over_sampling` times as many; then as many as should be needed at the share kept so far,
        but never more than a batch.
        """
        return self._in_time(self._end_of_waves() - len(self.pending) - len(self.verdicts))

    def finish_now(self) -> list[int]:
        """Await the first unfinished groups again, as many as the batch lacks, where no more may be begun; their responses are to end."""
        if self.batch() is not None or self.pending or self.next_wave():
            return []
        unfinished = sorted(group for group, verdict in self.verdicts.items() if verdict.reason == UNFINISHED)
        chosen = unfinished[: self.target - len(self.waiting) - self._kept()]
        for group in chosen:
            del self.verdicts[group]
        self.pending = sorted({*self.pending, *chosen})
        return chosen

    def groups_wanted(self, batches: int = 1) -> int:
        """Return the groups to admit now where stages overlap: those of the waves, and more ahead of decisions.

        Which groups are in a batch does not depend on it.

        Args:
            batches: how many are asked for: this one, and those after it for which rows may be begun already.
        """
        return max(self.next_wave(), self._in_time(self.under_way(batches) - len(self.pending)))

    def under_way(self, batches: int = 1) -> int:
        """Return how many undecided groups there should be for so many batches, at the share kept so far, this batch's and the last one's.

        They are never more than are asked for.
        """
        kept = self._kept()
        before = self.observed or (self.target, self.target)
        missing = batches * self.target - len(self.waiting) - kept
        share = (kept + before[0]) / (len(self.verdicts) + before[1])
        return min(math.ceil(missing / share), batches * self.target)

    def members(self) -> list[tuple[int, int, int]]:
        """Return the kept groups that belong to the batch however the others are decided, by number.

        Each is (group, least place, largest place): where it is among the batch's groups, from 0, if none or all of the undecided
        groups before it are kept. Unfinished ones may still have a place, but take none, until the batch is known.
        """
        kept, undecided, unfinished, found = 0, 0, 0, []
        is_known = self.batch() is not None
        for group in sorted({*self.waiting, *self.verdicts, *self.pending}):
            if kept + undecided >= self.target:
                break
            if group not in self.waiting and group not in self.verdicts:
                undecided += 1
            elif group in self.waiting or self.verdicts[group].reason is None:
                found.append((group, kept, min(kept + undecided + unfinished, self.target - 1)))
                kept += 1
            else:
                unfinished += self.verdicts[group].reason == UNFINISHED and not is_known
        return found

    def needless(self, decided: Mapping[int, bool]) -> list[int]:
        """Return the groups of those awaited that cannot be in the batch any more, once these of them are known to be kept or not.

        None where surplus is kept: then all of them are waited for.
        """
        if self.surplus == "keep":
            return []
        known = {group: verdict.reason is None for group, verdict in self.verdicts.items()}
        return groups_to_abort(self.pending, {**dict.fromkeys(self.waiting, True), **known, **decided}, self.target)

    def admit(self, groups: Sequence[int]) -> None:
        """Note the groups of a wave. Raises ValueError unless their numbers go on from those before."""
        for group in groups:
            if group <= self.admitted:
                raise ValueError(f"group {group} is admitted after group {self.admitted}: numbers only rise")
            self.admitted = group
            self.pending.append(group)

    def decide(self, verdicts: Mapping[int, Verdict]) -> None:
        """Note verdicts, in any order and in any portions.

        Raises ValueError for a group that is not awaited, and UserError when a whole epoch of groups brought nothing to keep.
        """
        awaited = set(self.pending)
        for group, verdict in verdicts.items():
            if group not in awaited:
                raise ValueError(f"group {group} is not awaited: it was decided before, or never admitted")
            self.verdicts[group] = verdict
        self.pending = [group for group in self.pending if group not in verdicts]
        self._judge()

    def batch(self) -> tuple[int, ...] | None:
        """Return the batch's groups as soon as no undecided group can come before them, or None."""
        kept = sorted((*self.waiting, *(group for group, v in self.verdicts.items() if v.reason is None)))
        if len(kept) < self.target or any(group < kept[self.target - 1] for group in self.pending):
            return None
        return tuple(kept[: self.target])

    def is_complete(self) -> bool:
        """Return whether the batch can be finished: it is known, its waves are admitted, and their surplus is decided where it is kept."""
        awaited = self.surplus == "keep" and not set(self.pending) <= set(self._ahead())
        return self.batch() is not None and not self.next_wave() and not awaited

    def finish(self, usable: Callable[[int], bool] | None = None) -> Selection:
        """End the batch.

        Args:
            usable: whether a group's rows are young enough for the next batch, where groups were admitted ahead of the waves. On-policy
                all of these are returned; else they are carried over but for those up to the last that is too old.

        Raises:
            ValueError: The batch is not complete, or its surplus is not known where that is kept.
        """
        groups, ahead = self.batch(), self._ahead() if usable else []
        if groups is None or (self.surplus == "keep" and not set(self.pending) <= set(ahead)):
            raise ValueError(f"the batch is not complete: {len(self.pending)} groups are undecided")
        # Groups that go on have lower numbers than kept ones that wait, in whose places they are beyond the waves.
        ahead = [group for group in ahead if group > groups[-1]]
        old = max((place for place, group in enumerate(ahead) if usable and not usable(group)), default=-1)
        carried = ahead[old + 1 :] if self.max_staleness else []
        unfinished = [group for group, verdict in self.verdicts.items() if verdict.reason == UNFINISHED]
        returned = [] if self.max_staleness else ahead
        reasons = dict.fromkeys(self.expired, STALE)
        after: dict[int, int] = {}
        for group in sorted(
            {*self.waiting, *self.verdicts, *self.pending} - {*groups, *carried, *returned, *unfinished}
        ):
            verdict = self.verdicts.get(group, Verdict(version=self.waiting.get(group, 0)))
            # What comes after the batch counts as surplus whatever its verdict: some may not be decided yet.
            if self.surplus == "drop" and group > groups[-1]:
                reasons[group] = SURPLUS
            elif group in self.pending or group in ahead:
                reasons[group] = verdict.reason or STALE
            elif verdict.reason is None:
                after[group] = verdict.version
            else:
                reasons[group] = verdict.reason
        self._end(after, carried, returned)
        self.pending = sorted({*self.pending, *unfinished})
        self.verdicts = {group: verdict for group, verdict in self.verdicts.items() if group not in unfinished}
        return Selection(
            groups,
            dict(Counter(reasons.values())),
            tuple(sorted(reasons)),
            tuple(after),
            tuple(carried),
            tuple(returned),
        )

    def settled(self, keeps_rows: bool = False) -> "GroupSelector":
        """Return the state between two batches without the groups that were admitted ahead: their numbers are given out again.

        With `keeps_rows` they, and those that go on, are awaited with what their rows have.
        """
        known = sorted({*self.pending, *self.verdicts})
        first = min(known, default=self.admitted + 1)
        settled = replace(self, pending=known, verdicts={}, judged=min(self.judged, first - 1))
        return settled if keeps_rows else replace(settled, pending=[], admitted=first - 1)

    def state(self) -> dict[str, Any]:
        """Return everything as JSON, for a checkpoint at any moment."""
        state = asdict(self)
        for name in ("waiting", "verdicts"):
            state[name] = [[group, value] for group, value in state[name].items()]
        return {**state, "expired": list(self.expired)}

    @staticmethod
    def restored(state: Mapping[str, Any]) -> "GroupSelector":
        """Return what `state` describes."""
        verdicts = {
            group: Verdict(**{**verdict, "scores": tuple(verdict["scores"]) if verdict.get("scores") else None})
            for group, verdict in state["verdicts"]
        }
        changed = {"waiting": dict(state["waiting"]), "verdicts": verdicts, "expired": tuple(state["expired"])}
        pairs = {name: tuple(state[name]) for name in ("observed", "barren_scores") if state.get(name)}
        return GroupSelector(**{**state, **changed, **pairs})

    def _in_time(self, wanted: int) -> int:
        """Return how many of the wanted groups may be begun: with unfinished ones as many as can be trained on in time."""
        unfinished = sum(verdict.reason == UNFINISHED for verdict in self.verdicts.values())
        if unfinished:
            room = (self.max_staleness + 1) * self.target - unfinished - len(self.pending)
            wanted = min(wanted, room) if unfinished < self.max_staleness * self.target else 0
        return max(0, wanted)

    def _kept(self) -> int:
        return sum(verdict.reason is None for verdict in self.verdicts.values())

    def _end_of_waves(self) -> int:
        """Return how many groups the waves have that verdicts, in the order of numbers, call for."""
        numbers = sorted((*self.verdicts, *self.pending))
        missing = self.target - len(self.waiting)
        # rounded first, so that 1.1 times 10 is 11
        end, done, kept = math.ceil(round(max(0, missing) * self.over_sampling, 6)), 0, 0
        while end <= len(numbers) and all(group in self.verdicts for group in numbers[done:end]):
            kept += sum(self.verdicts[group].reason is None for group in numbers[done:end])
            done = end
            if missing <= kept:
                break
            needed = -(-(missing - kept) * (done + 2) // (kept + 1))
            end += min(max(needed, missing - kept), self.target)
        return end

    def _ahead(self) -> list[int]:
        """Return the groups that were admitted beyond the waves."""
        return sorted((*self.verdicts, *self.pending))[self._end_of_waves() :]

    def _end(self, waiting: dict[int, int], carried: Sequence[int], returned: Sequence[int]) -> None:
        """Begin the time between two batches."""
        own = [verdict for group, verdict in self.verdicts.items() if group not in {*carried, *returned}]
        ended = [verdict for verdict in own if verdict.reason != UNFINISHED]
        if ended:
            self.observed = sum(verdict.reason is None for verdict in ended), len(ended)
        self.waiting, self.expired, self.is_open = waiting, (), False
        self.pending = [group for group in self.pending if group in carried]
        self.verdicts = {group: self.verdicts[group] for group in carried if group in self.verdicts}
        if returned:
            self.admitted = returned[0] - 1
            self.judged = min(self.judged, self.admitted)
        if self.surplus == "drop":
            self.barren, self.barren_scores = {}, None

    def _judge(self) -> None:
        """Count groups in the order of their numbers, so that the end of a hopeless run does not depend on arrival."""
        groups = self.batch()
        end = min(self.pending, default=self.admitted + 1)
        if groups is not None and self.surplus == "drop":
            end = groups[-1] + 1
        for group in sorted(g for g in self.verdicts if self.judged < g < end):
            self.judged = group
            reason = self.verdicts[group].reason
            if reason == UNFINISHED:
                continue
            if reason is None:
                self.barren, self.barren_scores = {}, None
                continue
            self.barren = {**self.barren, reason: self.barren.get(reason, 0) + 1}
            self.barren_scores = wider(self.barren_scores, self.verdicts[group].scores)
            if sum(self.barren.values()) >= self.epoch_groups:
                raise UserError(nothing_to_learn(self.barren, self.barren_scores))


def groups_to_abort(under_way: Iterable[int], decided: Mapping[int, bool], wanted: int) -> list[int]:
    """Return the groups that cannot be in the batch any more, of those under way, ascending.

    groups   0 kept   1 dropped   2 kept   3 ...   4 ...      two are wanted: 0 and 2 are the batch whatever comes, so that 3 and
                                                              4 may be aborted

    `decided` says of each finished group whether it is kept. The batch is the first `wanted` kept groups by number, never by who
    was first: a group may end early only when all those before it are decided and enough of them kept.
    """
    left = sorted(set(under_way) - decided.keys())
    kept = 0
    for group in sorted({*left, *decided}):
        if group not in decided:
            return []
        kept += decided[group]
        if kept == wanted:
            return [later for later in left if later > group]
    return []


GRADED = (
    ". Right is a score of at least reward.correct_score, by default the recipe's; for graded scores lower it, or write "
    "algorithm.dynamic_sampling=rewards"
)


def scores_by_group(index: Rows) -> dict[int, tuple[float, float]]:
    """Return the lowest and the highest score of each group's rows; nothing for rows without scores."""
    found: dict[int, tuple[float, float]] = {}
    if "score" in index:
        for group, score in zip(index["group"].tolist(), index["score"].tolist(), strict=True):
            low, high = found.get(group, (score, score))
            found[group] = min(low, score), max(high, score)
    return found


def wider(known: tuple[float, float] | None, more: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return the range that covers two ranges, of which either may be missing."""
    if known is None or more is None:
        return known or more
    return min(known[0], more[0]), max(known[1], more[1])


def nothing_to_learn(dropped: Mapping[str, int], scores: tuple[float, float] | None = None) -> str:
    """Return why an epoch without a kept group ends the run, and what to change.

    Args:
        dropped: Number of groups by reason.
        scores: The lowest and the highest score in them.
    """
    counts = ", ".join(f"{reason.replace('_', ' ')}: {count}" for reason, count in sorted(dropped.items()))
    seen = ""
    if scores is not None:
        low, high = scores
        seen = f"; every score was {low:.4g}" if low == high else f"; scores from {low:.4g} to {high:.4g}"
    return (
        f"selection dropped every one of {sum(dropped.values())} groups in a row, a whole epoch ({counts}{seen}): "
        "a group whose answers all have the same score teaches nothing; use prompts that the model sometimes gets right, "
        f"raise rollout.samples_per_prompt, or check reward.verify against a few answers{GRADED if 'all wrong' in counts else ''}"
    )


# Groups that are older than the version that their batch is trained on, where a share of each batch shall be of that version:
#
# group   0   1   2   3 │ 4   5   6   7       a batch of eight, on_policy_share=0.5: 0 to 3 may be begun with the version before,
#         may be older  │ wait for version    4 to 7 wait for an engine with the batch's own; meanwhile it begins 0 to 3 of the next
#
# It is decided by group number when rows are begun, never by dropping what is done: a batch has as many places for older groups as the
# share leaves, a group that selection drops gives its place to the next by number, and what has no place waits.


def older_places(share: float, prompts: int) -> int | None:
    """Return how many groups of a batch of `prompts` may be older than the version that it is trained on; None is all of them."""
    # rounded first, so that 0.9 of 10 leaves 1
    return int(round((1 - share) * prompts, 6)) if share else None


def waiting_groups(begun: Mapping[int, int | None], groups: Set[int], version: int, places: int) -> set[int]:
    """Return the groups of a batch that only an engine with the batch's own version may begin, or go on beginning.

    Args:
        begun: for each group that may come into the batch the oldest version that a row of it was begun with; None while none is.
        groups: those of them that are expected in it.
        version: the one that the batch is trained on.
        places: how many groups may be older.
    """
    older = {group for group, with_version in begun.items() if with_version is not None and with_version < version}
    others = sorted(groups - older)
    return set(others[max(0, places - len(older)) :])


def begun_too_many(begun: Mapping[int, int | None], places: int) -> set[int]:
    """Return the begun groups that would have no place in the next batch, for which they are older: all but the last by number."""
    found = sorted(group for group, version in begun.items() if version is not None)
    return set(found[: max(0, len(found) - places)])
