"""The batches of a run: which groups make one, which rows belong to which optimizer step, and which weights it is trained on.

    begin ─▶ next_wave ─▶ admit ─▶ (generate, verify, select) ─▶ decide ─▶ enough kept? ─▶ batch, finish ─▶ updates
                 ▲                                                              │ no
                 └──────────────────────────────────────────────────────────────┘

Everything is decided by group number, never by who finished first, which would favour short answers: a wave is sized only when all
earlier groups are decided, the batch is the first kept groups by number, and a seeded shuffle of them makes the updates. A flow that
selects nothing keeps every group, so that its first wave is its batch.

version  0            1            2            3          publications of a role's weights, one at the end of each iteration
batch    └─ 1 on 0 ──▶└─ 2 on 1 ──▶└─ 3 on 2 ──▶           iteration k trains batch k on version k - 1 and publishes version k

Staleness is the version that a batch is trained on less that of the oldest token. A role that skips an iteration (`when`) publishes
what it has, so that version and iteration keep step.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from braidrl.algorithms.random import permutation
from braidrl.errors import UserError
from braidrl.flow.readiness import Uid

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


class Update(NamedTuple):
    """The rows of one optimizer step and its epoch."""

    epoch: int
    rows: tuple[Uid, ...]


@dataclass(frozen=True)
class Sizes:
    """As in the configuration; `rows_per_update` is never None here, and `epoch_groups` are the prompts of an epoch."""

    iterations: int
    prompts_per_step: int
    samples_per_prompt: int
    rows_per_update: int
    epochs: int = 1
    max_staleness: int = 0
    surplus: Literal["drop", "keep"] = "drop"
    epoch_groups: int = 1_000_000
    seed: int = 0
    over_sampling: float = 1.0

    def sampling(self) -> GroupSelector:
        """Return the selection at the run's beginning."""
        return GroupSelector(
            self.prompts_per_step, self.epoch_groups, self.surplus, self.max_staleness, self.over_sampling
        )

    def updates(self, iteration: int, uids: Sequence[Uid]) -> list[Update]:
        """Return the optimizer steps of a batch, in order."""
        plan = update_plan(
            [uid[1] for uid in uids], [uid[2] for uid in uids],
            rows_per_update=self.rows_per_update, epochs=self.epochs, seed=self.seed, iteration=iteration,
        )  # fmt: skip
        per_epoch = len(plan) // self.epochs
        return [Update(n // per_epoch, tuple(uids[i] for i in rows)) for n, rows in enumerate(plan)]


def check_update_size(prompts_per_step: int, samples_per_prompt: int, rows_per_update: int | None) -> int:
    """Return the rows of one optimizer step (None is the whole batch). Raises UserError unless a batch is a whole number of updates."""
    rows = prompts_per_step * samples_per_prompt
    if rows_per_update is None:
        return rows
    if rows % rows_per_update:
        divisors = [n for n in range(1, rows + 1) if rows % n == 0]
        below = max(n for n in divisors if n < rows_per_update)
        above = min((n for n in divisors if n > rows_per_update), default=rows)
        raise UserError(
            f"trainer.rows_per_update={rows_per_update} does not divide the {rows} rows of a batch "
            f"(trainer.prompts_per_step={prompts_per_step} × rollout.samples_per_prompt={samples_per_prompt}); "
            f"write {' or '.join(str(n) for n in dict.fromkeys((below, above)))}"
        )
    return rows_per_update


def update_plan(
    groups: Sequence[int], samples: Sequence[int], *, rows_per_update: int, epochs: int, seed: int, iteration: int
) -> list[list[int]]:
    """Return the row positions of each optimizer step, epoch after epoch; rows of one step are in the order of (group, sample).

    Args:
        groups: Group of each row of the batch, in any order.
        samples: Sample of each row.
        rows_per_update: Rows of one step.
        epochs: Passes over the batch.
        seed: The run's.
        iteration: Number of the batch.

    Raises:
        ValueError: The rows are no whole number of updates, or two rows have one identity.
    """
    identities = list(zip(groups, samples, strict=True))
    if len(set(identities)) < len(identities):
        raise ValueError("two rows of the batch have the same group and sample")
    if len(identities) % rows_per_update:
        raise ValueError(f"{len(identities)} rows are no whole number of updates of {rows_per_update} rows")
    distinct, updates = sorted(set(groups)), list[list[int]]()
    for epoch in range(epochs):
        order = permutation((seed, "updates", iteration, epoch), len(distinct)).tolist()
        place = {distinct[group]: i for i, group in enumerate(order)}
        shuffled = sorted(range(len(identities)), key=lambda row: (place[groups[row]], samples[row]))
        for start in range(0, len(shuffled), rows_per_update):
            updates.append(sorted(shuffled[start : start + rows_per_update], key=identities.__getitem__))
    return updates


class TooStale(RuntimeError):
    """Rows older than `max_staleness` reached training: admission let too much in."""


def trained_on(iteration: int) -> int:
    """Return the version whose weights iteration `iteration` (from 1) starts from."""
    return iteration - 1


def admissible(iteration: int, engine_version: int, max_staleness: int) -> bool:
    """Return whether prompts for the batch of `iteration` may be admitted while the engine holds `engine_version`.

    A row begun now has tokens of this version or later ones, whatever is loaded while it is generated.
    """
    return trained_on(iteration) - engine_version <= max_staleness


def check_staleness(iteration: int, versions: Sequence[int], max_staleness: int, uids: Sequence[Any]) -> int:
    """Return the largest staleness in a batch. Raises TooStale, naming the row, if it is over the bound or a version not yet published.

    Args:
        iteration: Number of the batch, from 1.
        versions: The version of each row's oldest token.
        max_staleness: The bound.
        uids: Names of the rows.
    """
    oldest = 0
    for uid, version in zip(uids, versions, strict=True):
        behind = trained_on(iteration) - version
        if not 0 <= behind <= max_staleness:
            raise TooStale(
                f"row {uid} has tokens of version {version}, and iteration {iteration} trains on version "
                f"{trained_on(iteration)} with max_staleness={max_staleness}"
            )
        oldest = max(oldest, behind)
    return oldest
