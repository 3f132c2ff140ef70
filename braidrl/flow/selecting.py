"""Selection of the groups of each batch, and admission of prompts for it.

    begin ─▶ next_wave ─▶ admit ─▶ (generate, verify, select) ─▶ decide ─▶ enough kept? ─▶ batch, finish
                 ▲                                                              │ no
                 └──────────────────────────────────────────────────────────────┘

Every decision follows group numbers, never completion order, which would favour short answers. The size of a wave
depends on verdicts in the order of numbers, and the batch is the first kept groups. A flow without `select` keeps every
group: its first wave is its batch. If stages overlap, `groups_wanted` admits groups ahead of the waves; this never
changes a batch:

    numbers  0 ... 7 │ 8 ... 13 │ 14 15 16  14 to 16 were admitted ahead of the waves. They belong to the
             wave 1  │ wave 2   │ ahead     next batch; on-policy, their numbers are admitted again for it
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from braidrl.data.rows import Rows
from braidrl.errors import UserError

SURPLUS = "surplus"
STALE = "stale"
UNFINISHED = "unfinished"
"""The group is not dropped: its suspended responses resume in a later batch."""


@dataclass(frozen=True)
class Verdict:
    """The result of the select stages for a group: kept if `reason` is None; `version` is the oldest of its tokens."""

    reason: str | None = None
    version: int = 0
    scores: tuple[float, float] | None = None
    """The lowest and the highest score of its rows, for the message when an epoch keeps no group."""


@dataclass(frozen=True)
class Selection:
    """A finished batch: its groups by number, dropped groups by reason, and the groups that remain.

    `dropped` counts the groups that ended with this batch. `released` are all groups whose rows can be deleted; some
    may still be in progress if `surplus` is dropped. `surplus` are the groups that wait for the next batch. Of the
    groups admitted ahead, `carried` belong to the next batch; `returned` are deleted and their numbers are admitted
    again.
    """

    groups: tuple[int, ...]
    dropped: dict[str, int]
    released: tuple[int, ...]
    surplus: tuple[int, ...]
    carried: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()


@dataclass
class GroupSelector:
    """Selector of the groups of each batch, with its state for the whole run; all of the state is JSON.

    A batch has `target` groups and an epoch `epoch_groups` prompts. Raises UserError if surplus is kept but no batch
    may train on it.
    """

    target: int
    epoch_groups: int
    surplus: Literal["drop", "keep"] = "drop"
    max_staleness: int = 0
    over_sampling: float = 1.0
    """Size of a batch's first wave relative to the number of missing groups."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Kept groups from earlier batches, with their versions."""
    pending: list[int] = field(default_factory=list)
    """Undecided groups admitted for this batch."""
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    """Decided groups of this batch."""
    consecutive_dropped: dict[str, int] = field(default_factory=dict)
    """Number of groups dropped since the last kept one, by reason."""
    barren_scores: tuple[float, float] | None = None
    """The lowest and the highest score in these groups."""
    judged: int = -1
    """The largest group number counted in `consecutive_dropped`."""
    admitted: int = -1
    """The largest admitted group number."""
    expired: tuple[int, ...] = ()
    """Surplus groups that were too old at the start of this batch."""
    is_open: bool = False
    """True between the start and the end of a batch."""
    observed: tuple[int, int] | None = None
    """Numbers of kept and of decided groups in the previous batch; None in the first."""

    def __post_init__(self) -> None:
        if self.surplus == "keep" and self.max_staleness < 1:
            raise UserError(
                "trainer.surplus=keep trains surplus groups one version late, which trainer.max_staleness=0 forbids; "
                "write trainer.max_staleness=1 or trainer.surplus=drop"
            )

    def begin(self, version: int) -> None:
        """Start a batch to be trained on `version`; drop surplus that is too old for it as `stale`."""
        if self.is_open:
            raise ValueError("the batch before this one is not finished")
        self.is_open = True
        self.expired = tuple(g for g, made_on in sorted(self.waiting.items()) if version - made_on > self.max_staleness)
        for group in self.expired:
            del self.waiting[group]

    def next_wave(self) -> int:
        """Return the number of groups to admit now: 0 while some are undecided, or if enough are kept.

        The first wave has the missing number of groups times `over_sampling`. Later waves have the number expected from
        the share kept so far, at most a batch.
        """
        end, numbers = self._waves()
        return self._in_time(end - len(numbers))

    def finish_now(self) -> list[int]:
        """Return unfinished groups to complete for this batch, as many as it lacks, if no further group may start."""
        if self.batch() is not None or self.pending or self.next_wave():
            return []
        unfinished = sorted(group for group, verdict in self.verdicts.items() if verdict.reason == UNFINISHED)
        kept = sum(verdict.reason is None for verdict in self.verdicts.values())
        chosen = unfinished[: self.target - len(self.waiting) - kept]
        for group in chosen:
            del self.verdicts[group]
        self.pending = sorted({*self.pending, *chosen})
        return chosen

    def groups_wanted(self, batches: int = 1) -> int:
        """Return how many groups to admit now, if stages overlap, for `batches` batches; batches stay the same."""
        return max(self.next_wave(), self._in_time(self.under_way(batches) - len(self.pending)))

    def under_way(self, batches: int = 1) -> int:
        """Return how many undecided groups some batches need, at most all of theirs, by the share kept in this batch
        and the last.
        """
        kept = sum(verdict.reason is None for verdict in self.verdicts.values())
        before = self.observed or (self.target, self.target)
        missing = batches * self.target - len(self.waiting) - kept
        share = (kept + before[0]) / (len(self.verdicts) + before[1])
        return min(math.ceil(missing / share), batches * self.target)

    def members(self) -> list[tuple[int, int, int]]:
        """Return the kept groups that are certain to be in the batch, by number.

        Each is (group, lowest rank, highest rank). The ranks, from 0, are its position among the batch's groups if none
        or all of the undecided groups before it are kept. Until the batch is known, unfinished groups raise only the
        highest rank.
        """
        kept, undecided, unfinished, chosen = 0, 0, 0, []
        is_known = self.batch() is not None
        for group in sorted({*self.waiting, *self.verdicts, *self.pending}):
            if kept + undecided >= self.target:
                break
            if group not in self.waiting and group not in self.verdicts:
                undecided += 1
            elif group in self.waiting or self.verdicts[group].reason is None:
                chosen.append((group, kept, min(kept + undecided + unfinished, self.target - 1)))
                kept += 1
            else:
                unfinished += self.verdicts[group].reason == UNFINISHED and not is_known
        return chosen

    def kept(self) -> list[int]:
        """Return the groups that are kept so far, by number."""
        return sorted([*self.waiting, *[group for group, verdict in self.verdicts.items() if verdict.reason is None]])

    def admit(self, groups: Sequence[int]) -> None:
        """Record admitted groups. Raises ValueError unless their numbers increase."""
        before = [self.admitted, *groups]
        if before != sorted(set(before)):
            late = next(number for number, group in enumerate(groups) if group <= before[number])
            raise ValueError(f"group {groups[late]} is admitted after group {before[late]}: numbers only rise")
        self.admitted = before[-1]
        self.pending.extend(groups)

    def decide(self, verdicts: Mapping[int, Verdict]) -> None:
        """Record verdicts in any order.

        Raises ValueError for a group that is not pending, UserError if a whole epoch was dropped.
        """
        if others := verdicts.keys() - self.pending:
            raise ValueError(f"group {min(others)} is not awaited: it was decided before, or never admitted")
        self.verdicts.update(verdicts)
        self.pending = [group for group in self.pending if group not in verdicts]
        # Dropped groups are counted in the order of their numbers, so that the step at which a run without usable
        # groups ends does not depend on arrival.
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
                self.consecutive_dropped, self.barren_scores = {}, None
                continue
            self.consecutive_dropped = {**self.consecutive_dropped, reason: self.consecutive_dropped.get(reason, 0) + 1}
            ranges = [scores for scores in (self.barren_scores, self.verdicts[group].scores) if scores is not None]
            if ranges:
                self.barren_scores = min(low for low, _ in ranges), max(high for _, high in ranges)
            if (dropped := sum(self.consecutive_dropped.values())) < self.epoch_groups:
                continue
            counts = ", ".join(
                f"{why.replace('_', ' ')}: {count}" for why, count in sorted(self.consecutive_dropped.items())
            )
            range_text, graded = "", GRADED if "all wrong" in counts else ""
            if self.barren_scores is not None:
                low, high = self.barren_scores
                range_text = f"; every score was {low:.4g}" if low == high else f"; scores from {low:.4g} to {high:.4g}"
            raise UserError(
                f"selection dropped every one of {dropped} groups in a row, a whole epoch ({counts}{range_text}): a "
                "group whose answers all have the same score teaches nothing; use prompts that the model sometimes "
                f"gets right, raise rollout.samples_per_prompt, or check reward.verify against a few answers{graded}"
            )

    def batch(self) -> tuple[int, ...] | None:
        """Return the batch's groups, or None while an undecided group may still precede one of them."""
        kept = self.kept()
        if len(kept) < self.target or min(self.pending, default=kept[-1]) < kept[self.target - 1]:
            return None
        return tuple(kept[: self.target])

    def is_complete(self) -> bool:
        """Return True if the batch can be finished: it is known, its waves are admitted, surplus to keep is decided."""
        end, numbers = self._waves()
        awaited = self.surplus == "keep" and not set(self.pending) <= set(numbers[end:])
        return self.batch() is not None and not self.next_wave() and not awaited

    def finish(self, usable: Callable[[int], bool] | None = None) -> Selection:
        """Finish the batch. On-policy all groups admitted ahead are returned; else those after the last one that
        `usable` finds too old are carried over.

        Raises ValueError if the batch is not complete, or surplus to keep is undecided.
        """
        groups, ahead = self.batch(), list[int]()
        if usable:
            end, numbers = self._waves()
            ahead = numbers[end:]
        if groups is None or (self.surplus == "keep" and not set(self.pending) <= set(ahead)):
            raise ValueError(f"the batch is not complete: {len(self.pending)} groups are undecided")
        # Suspended groups may have lower numbers than waiting ones, and are then counted as ahead of the waves.
        ahead = [group for group in ahead if group > groups[-1]]
        old = max((position for position, group in enumerate(ahead) if usable and not usable(group)), default=-1)
        carried = ahead[old + 1 :] if self.max_staleness else []
        unfinished = [group for group, verdict in self.verdicts.items() if verdict.reason == UNFINISHED]
        returned = [] if self.max_staleness else ahead
        reasons = dict.fromkeys(self.expired, STALE)
        after: dict[int, int] = {}
        for group in sorted(
            {*self.waiting, *self.verdicts, *self.pending} - {*groups, *carried, *returned, *unfinished}
        ):
            verdict = self.verdicts.get(group, Verdict(version=self.waiting.get(group, 0)))
            # A group after the batch counts as surplus for any verdict: it may not be decided yet.
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
        for group in unfinished:
            self.verdicts.pop(group, None)
        return Selection(
            groups,
            dict(Counter(reasons.values())),
            tuple(sorted(reasons)),
            tuple(after),
            tuple(carried),
            tuple(returned),
        )

    def settled(self, keeps_rows: bool = False) -> "GroupSelector":
        """Return the state between two batches without the groups admitted ahead, whose numbers are admitted again.

        With `keeps_rows` these groups and unfinished ones stay pending, with the columns that their rows have.
        """
        numbers = sorted({*self.pending, *self.verdicts})
        first = min(numbers, default=self.admitted + 1)
        settled = replace(self, pending=numbers, verdicts={}, judged=min(self.judged, first - 1))
        return settled if keeps_rows else replace(settled, pending=[], admitted=first - 1)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON, for a checkpoint at any time."""
        state = asdict(self)
        for name in ("waiting", "verdicts"):
            state[name] = [[group, value] for group, value in state[name].items()]
        return {**state, "expired": list(self.expired)}

    @staticmethod
    def restored(state: Mapping[str, Any]) -> "GroupSelector":
        """Return a selector with the state from `state()`."""
        verdicts = {
            group: Verdict(**{**verdict, "scores": tuple(verdict["scores"]) if verdict.get("scores") else None})
            for group, verdict in state["verdicts"]
        }
        changed = {"waiting": dict(state["waiting"]), "verdicts": verdicts, "expired": tuple(state["expired"])}
        pairs = {name: tuple(state[name]) for name in ("observed", "barren_scores") if state.get(name)}
        return GroupSelector(**{**state, **changed, **pairs})

    def _in_time(self, groups: int) -> int:
        """Limit the number of groups to start, so that unfinished groups can be trained on within `max_staleness`."""
        unfinished = sum(verdict.reason == UNFINISHED for verdict in self.verdicts.values())
        if unfinished:
            room = (self.max_staleness + 1) * self.target - unfinished - len(self.pending)
            groups = min(groups, room) if unfinished < self.max_staleness * self.target else 0
        return max(0, groups)

    def _waves(self) -> tuple[int, list[int]]:
        """Return the total size of the waves, by verdicts in the order of numbers, and this batch's numbers; those
        beyond it are ahead.
        """
        numbers = sorted((*self.verdicts, *self.pending))
        missing = self.target - len(self.waiting)
        # Rounding first makes 1.1 times 10 equal 11.
        end, done, kept = math.ceil(round(max(0, missing) * self.over_sampling, 6)), 0, 0
        while end <= len(numbers) and self.verdicts.keys() >= set(numbers[done:end]):
            kept += [self.verdicts[group].reason for group in numbers[done:end]].count(None)
            done = end
            if missing <= kept:
                break
            needed = -(-(missing - kept) * (done + 2) // (kept + 1))
            end += min(max(needed, missing - kept), self.target)
        return end, numbers

    def _end(self, waiting: dict[int, int], carried: Sequence[int], returned: Sequence[int]) -> None:
        """Reset the state after a batch."""
        ahead = {*carried, *returned}
        decided = [verdict for group, verdict in self.verdicts.items() if group not in ahead]
        ended = [verdict for verdict in decided if verdict.reason != UNFINISHED]
        if ended:
            self.observed = sum(verdict.reason is None for verdict in ended), len(ended)
        self.waiting, self.expired, self.is_open = waiting, (), False
        self.pending = [group for group in self.pending if group in carried]
        self.verdicts = {group: self.verdicts[group] for group in carried if group in self.verdicts}
        if returned:
            self.admitted = returned[0] - 1
            self.judged = min(self.judged, self.admitted)
        if self.surplus == "drop":
            self.consecutive_dropped, self.barren_scores = {}, None


GRADED = (
    ". Right is a score of at least reward.correct_score, by default the recipe's; for graded scores lower it, or "
    "write algorithm.dynamic_sampling=rewards"
)


def verdicts_by_group(
    index: Rows, reasons: Mapping[int, str | None], version: int, partial: bool = False
) -> dict[int, Verdict]:
    """Return the verdict of each group of some rows: dropped for one of `reasons`, or kept. With `partial` its version
    is the oldest of its rows.
    """
    groups, group_of_row = np.unique(index["group"].numpy(), return_inverse=True)
    oldest = np.full(len(groups), version)
    if partial:
        np.minimum.at(oldest, group_of_row, index["version"].numpy())
    # A batch has thousands of kept groups: those of one version share a verdict.
    kept = {version_of_group: Verdict(version=version_of_group) for version_of_group in np.unique(oldest).tolist()}
    verdicts = {
        group: kept[version_of_group] for group, version_of_group in zip(groups.tolist(), oldest.tolist(), strict=True)
    }
    dropped = [group for group, reason in reasons.items() if reason is not None and group in verdicts]
    scores = scores_by_group(index.take(torch.isin(index["group"], torch.tensor(dropped)))) if dropped else {}
    return verdicts | {group: Verdict(reasons[group], verdicts[group].version, scores.get(group)) for group in dropped}


def scores_by_group(index: Rows) -> dict[int, tuple[float, float]]:
    """Return the lowest and the highest score of each group's rows; empty for rows without scores."""
    if "score" not in index or not len(index):
        return {}
    groups, group_of_row = np.unique(index["group"].numpy(), return_inverse=True)
    scores = index["score"].double().numpy()
    low, high = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
    np.fmin.at(low, group_of_row, scores)
    np.fmax.at(high, group_of_row, scores)
    return dict(zip(groups.tolist(), zip(low.tolist(), high.tolist(), strict=True), strict=True))


# `on_policy_share` is the share of a batch's groups that must start on the version on which the batch is trained:
#
# group   0   1   2   3 │ 4   5   6   7       a batch of eight, on_policy_share=0.5: 0 to 3 may start on the version
#         may be older  │ wait for version    before; 4 to 7 wait for an engine with the batch's own version
#
# The decision is made by group number when rows start; finished rows are never dropped for it. The other groups of a
# batch may be older. If selection drops an older group, the next one by number takes its slot; a group without a slot
# waits.


def older_slots(share: float, prompts: int) -> int | None:
    """Return how many groups of a batch of `prompts` may start on a version older than its own; None means all."""
    # Rounding first makes a share of 0.9 of 10 leave 1.
    return int(round((1 - share) * prompts, 6)) if share else None


def started_too_many(started: Mapping[int, int | None], slots: int) -> set[int]:
    """Return the started groups that exceed the slots for older groups in the next batch: all but the last ones."""
    older = sorted(group for group, version in started.items() if version is not None)
    return set(older[: max(0, len(older) - slots)])
