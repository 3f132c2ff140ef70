"""Early stop: abort groups that the batch turns out not to need, by running selection while other groups still generate.

finished rows ──▶ checks ──▶ whole groups ──select──▶ kept or not ──▶ GroupSelector.needless ──▶ rows to abort
                   │  ▲
                   ▼  │ index columns
                other ranks

Which rows are aborted depends on timing. The batch does not: it is the first kept groups by number.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from braidrl.cluster.world import Notices
from braidrl.data.codec import pack_rows, unpack_rows
from braidrl.data.rows import Rows, Uid
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.compute import dropped
from braidrl.rewards.verify import Pending
from braidrl.runtimes.generating.verification import early_verify_stages, verified

Needless = Callable[[Mapping[int, bool]], Collection[int]]
"""Returns the groups that are no longer needed once these groups are known to be kept or dropped."""


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
        """Start a wave with the rows `uids` on all ranks, which exchange `notices`; None if this rank generates them all.

        `wave` is a number that no earlier wave had, the same on all ranks.
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
        """Send the remaining results to the other ranks, after all rows of this rank have ended; waits for their checks."""
        if self.notices is not None:
            self._news(wait=True)

    def _news(self, wait: bool) -> list[Rows]:
        """Return new results of this rank and of all others: index columns, including those of verify stages.

        This rank's are of the rows whose checks have ended, or with `wait` of all its rows.
        """
        ready = [wait or all(check.done() for check in checks) for _, checks in self.waiting]
        taken = [item for item, now in zip(self.waiting, ready, strict=True) if now]
        self.waiting = [item for item, now in zip(self.waiting, ready, strict=True) if not now]
        own = []
        for rows, checks in taken:
            for stage, check in zip(self.segment.verify, checks, strict=True):
                rows = rows.with_columns(verified(self.flow, stage, rows, check.result()))
            own.append(rows.index)
        if self.notices is None:
            return own
        if own:
            self.notices.tell(pack_rows(Rows.cat(own)))
        return [unpack_rows(message) for message in self.notices.hear()]
