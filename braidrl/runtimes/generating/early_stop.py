"""Ends the generation of groups that the batch turns out not to need: selection is asked while others are still being generated.

finished rows ──▶ checks ──▶ whole groups ──select──▶ kept or not ──▶ GroupSelector.needless ──▶ rows to abort
                   │  ▲
                   ▼  │ index columns
                other ranks

What ends early depends on who was fast; what is in the batch does not: it is the first kept groups by number.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from braidrl.cluster.world import Notices
from braidrl.data.codec import pack_rows, unpack_rows
from braidrl.data.rows import Rows, Uid
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.compute import dropped
from braidrl.rewards.verify import Pending
from braidrl.runtimes.generating.verification import early_verify_stages, verified

Needless = Callable[[Mapping[int, bool]], Collection[int]]
"""Groups that are not needed any more once these are known to be kept or not."""


@dataclass(frozen=True)
class Segment:
    """A flow's sampling segment where groups can be decided one by one, from what generation and rules say of them."""

    generate: Stage
    verify: tuple[Stage, ...]
    select: tuple[Stage, ...]


def segment_of(flow: Flow, iteration: int) -> Segment | None:
    """Return the flow's sampling segment, or None where selection needs more than rules see, or where stages are skipped."""
    if not flow.sampling_segment:
        return None
    generate, *rest = flow.sampling_segment
    verify = tuple(stage for stage in rest if stage.type == "verify")
    select = tuple(stage for stage in rest if stage.kind is Kind.SELECT)
    plain = generate.kind is Kind.GENERATE and not {"into", "environment", "greedy"} & generate.params.keys()
    simple = len(verify) + len(select) == len(rest) and set(verify) <= set(early_verify_stages(flow, generate))
    due = all(stage.when.includes(iteration) for stage in flow.sampling_segment)
    return Segment(generate, verify, select) if plain and simple and due else None


@dataclass
class EarlyStop:
    """Follows one wave while it is generated; of ranks that share it each has one, and knows all of the wave's groups."""

    segment: Segment
    needless: Needless
    flow: Flow
    left: dict[int, set[Uid]]
    """Of each group the rows that are not known yet."""
    notices: Notices | None = None
    """Where ranks tell each other what they have found; None for one that generates all of the wave."""
    waiting: list[tuple[Rows, list[Pending]]] = field(default_factory=list)
    """Finished rows, and their checks in the order of the verify stages."""
    known: dict[int, list[Rows]] = field(default_factory=dict)
    decided: dict[int, bool] = field(default_factory=dict)

    @staticmethod
    def of(
        segment: Segment, needless: Needless, flow: Flow, uids: Sequence[Uid], notices: Notices | None = None
    ) -> "EarlyStop":
        """Return what follows a wave; `uids` are all of its rows, whoever generates them."""
        left: dict[int, set[Uid]] = {}
        for uid in uids:
            left.setdefault(uid[1], set()).add(uid)
        return EarlyStop(segment, needless, flow, left, notices)

    def add(self, rows: Rows, checks: Mapping[str, Pending]) -> None:
        """Take finished rows, and their checks by verify stage, which have begun."""
        self.waiting.append((rows, [checks[stage.name] for stage in self.segment.verify]))

    def rows_to_end(self) -> list[Uid]:
        """Return the rows of groups that are not needed any more; some may have ended by themselves, or be another rank's. Never waits."""
        news = self._exchanged(self._checked(lambda checks: all(check.done() for check in checks)))
        for index in news:
            self._note(index)
        return [uid for group in self.needless(self.decided) for uid in sorted(self.left[group])] if news else []

    def close(self) -> None:
        """Tell the others what they do not know yet, once all rows of this rank have ended; waits for their checks."""
        if self.notices is not None:
            self._exchanged(self._checked(lambda checks: True))

    def _checked(self, is_ready: Callable[[Sequence[Pending]], bool]) -> list[Rows]:
        """Return the index columns, those of the verify stages too, of the rows whose checks are ready."""
        ready = [is_ready(checks) for _, checks in self.waiting]
        taken = [item for item, now in zip(self.waiting, ready, strict=True) if now]
        self.waiting = [item for item, now in zip(self.waiting, ready, strict=True) if not now]
        found = []
        for rows, checks in taken:
            for stage, check in zip(self.segment.verify, checks, strict=True):
                rows = rows.with_columns(verified(self.flow, stage, rows, check.result()))
            found.append(rows.index)
        return found

    def _exchanged(self, own: list[Rows]) -> list[Rows]:
        """Return what has become known: this rank's own, and what others have told."""
        if self.notices is None:
            return own
        if own:
            self.notices.tell(pack_rows(Rows.cat(own)))
        return [unpack_rows(message) for message in self.notices.hear()]

    def _note(self, index: Rows) -> None:
        for number, uid in enumerate(index.uids()):
            group = uid[1]
            self.left[group].discard(uid)
            self.known.setdefault(group, []).append(index.take([number]))
            if not self.left[group]:
                whole = Rows.cat(self.known.pop(group))
                self.decided[group] = not any(dropped(stage, whole) for stage in self.segment.select)
