"""Selection with refill: how many prompts to admit, which groups make the batch, what happens to those that are over.

    begin ─▶ next_wave ─▶ admit ─▶ (generate, verify, select) ─▶ decide ─▶ enough kept? ─▶ batch, finish
                 ▲                                                              │ no
                 └──────────────────────────────────────────────────────────────┘

Everything is decided by group number: a wave is sized only when all earlier groups are decided, and the batch is the first kept
groups by number. Who finishes first changes nothing, which would favour short answers. A flow that selects nothing keeps every
group, so that its first wave is its batch.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from braidrl.errors import UserError

SURPLUS = "surplus"
STALE = "stale"


@dataclass(frozen=True)
class Verdict:
    """What the select stages say of a group: kept if there is no `reason`; `version` is the oldest among its tokens."""

    reason: str | None = None
    version: int = 0


@dataclass(frozen=True)
class Selection:
    """A finished batch: its groups by number, groups dropped by reason, and what is over.

    `dropped` counts the groups that ended with this batch. `released` names all groups whose rows can be forgotten; some of them
    may still be in work where `surplus` is dropped. `surplus` names the groups that wait for the next batch.
    """

    groups: tuple[int, ...]
    dropped: dict[str, int]
    released: tuple[int, ...]
    surplus: tuple[int, ...]


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
    judged: int = -1
    """The largest group number that `barren` has counted."""
    admitted: int = -1
    """The largest group number admitted."""
    expired: tuple[int, ...] = ()
    """Surplus that became too old when this batch began."""

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
        if self.pending or self.verdicts:
            raise ValueError("the batch before this one is not finished")
        self.expired = tuple(g for g, made in sorted(self.waiting.items()) if version - made > self.max_staleness)
        for group in self.expired:
            del self.waiting[group]

    def next_wave(self) -> int:
        """Return the groups to admit now: 0 while some are undecided and when enough are kept.

        First as many as are missing, or `over_sampling` times as many; then as many as should be needed at the share kept so far,
        but never more than a batch.
        """
        kept = [v for v in self.verdicts.values() if v.reason is None]
        missing = self.target - len(self.waiting) - len(kept)
        if self.pending or missing <= 0:
            return 0
        if not self.verdicts:
            # rounded first, so that 1.1 times 10 is 11
            return math.ceil(round(missing * self.over_sampling, 6))
        needed = -(-missing * (len(self.verdicts) + 2) // (len(kept) + 1))
        return min(max(needed, missing), self.target)

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

    def finish(self) -> Selection:
        """End the batch. Raises ValueError before it is complete, or before its surplus is known where that is kept."""
        groups = self.batch()
        if groups is None or (self.surplus == "keep" and self.pending):
            raise ValueError(f"the batch is not complete: {len(self.pending)} groups are undecided")
        reasons = dict.fromkeys(self.expired, STALE)
        after: dict[int, int] = {}
        for group in sorted({*self.waiting, *self.verdicts, *self.pending} - set(groups)):
            verdict = self.verdicts.get(group, Verdict(version=self.waiting.get(group, 0)))
            # What comes after the batch counts as surplus whatever its verdict: some may not be decided yet.
            if self.surplus == "drop" and group > groups[-1]:
                reasons[group] = SURPLUS
            elif verdict.reason is None:
                after[group] = verdict.version
            else:
                reasons[group] = verdict.reason
        self.waiting, self.pending, self.verdicts, self.expired = after, [], {}, ()
        if self.surplus == "drop":
            self.barren = {}
        return Selection(groups, dict(Counter(reasons.values())), tuple(sorted(reasons)), tuple(after))

    def state(self) -> dict[str, Any]:
        """Return everything as JSON, for a checkpoint at any moment."""
        state = asdict(self)
        for name in ("waiting", "verdicts"):
            state[name] = [[group, value] for group, value in state[name].items()]
        return {**state, "expired": list(self.expired)}

    @staticmethod
    def restored(state: Mapping[str, Any]) -> "GroupSelector":
        """Return what `state` describes."""
        verdicts = {group: Verdict(**verdict) for group, verdict in state["verdicts"]}
        changed = {"waiting": dict(state["waiting"]), "verdicts": verdicts, "expired": tuple(state["expired"])}
        return GroupSelector(**{**state, **changed})

    def _judge(self) -> None:
        """Count groups in the order of their numbers, so that the end of a hopeless run does not depend on arrival."""
        groups = self.batch()
        end = min(self.pending, default=self.admitted + 1)
        if groups is not None and self.surplus == "drop":
            end = groups[-1] + 1
        for group in sorted(g for g in self.verdicts if self.judged < g < end):
            self.judged = group
            reason = self.verdicts[group].reason
            self.barren = {} if reason is None else {**self.barren, reason: self.barren.get(reason, 0) + 1}
            if sum(self.barren.values()) >= self.epoch_groups:
                raise UserError(nothing_to_learn(self.barren))


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


def nothing_to_learn(dropped: Mapping[str, int]) -> str:
    """Return why an epoch without a kept group ends the run, and what to change."""
    counts = ", ".join(f"{reason.replace('_', ' ')}: {count}" for reason, count in sorted(dropped.items()))
    return (
        f"selection dropped every one of {sum(dropped.values())} groups in a row, a whole epoch ({counts}): "
        "a group whose answers all have the same score teaches nothing; use prompts that the model sometimes gets right, "
        "raise rollout.samples_per_prompt, or check reward.verify against a few answers"
    )
