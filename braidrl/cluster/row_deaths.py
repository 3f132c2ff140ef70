"""Rows that end the processes that generate or check them: such a row is isolated, then left out.

process with rows A B C ──ends──▶ A B C: 1 death each
process with rows B D   ──ends──▶ B: 2 deaths, a suspect: from now on it runs alone ──its process ends──▶ 3: left out

A row runs alone before it is left out, so that it is not left out for a fault of another row.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from braidrl.data.identity import Uid

DEATHS_OF_ROW = 3
"""Processes that may end with a row; it then stays without a response."""
NAMED = 8
"""The most rows that a message names."""
Isolated = tuple[list[Uid], list[Uid]]
"""The suspects and the rows that are left out, as a message."""


class RowDeaths:
    """The number of processes that died while they had a row, and the rows isolated or skipped for that."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, Uid]]()
        """Ended processes by task and row."""
        self.suspects, self.left_out = set[Uid](), set[Uid]()
        """Rows that run alone, and rows that are not generated any more."""

    def record(self, task: str, rows: Collection[Uid], isolates: bool = True) -> list[Uid]:
        """Record that a process has died with rows of a task; return the rows that are skipped from now on.

        `isolates` is false for a task that always runs its rows together: these are only counted.
        """
        self.counts.update((task, row) for row in rows)
        if not isolates:
            return []
        new = sorted(row for row in rows if self.counts[task, row] >= DEATHS_OF_ROW and row not in self.left_out)
        self.left_out.update(new)
        self.suspects |= {row for row in rows if self.counts[task, row] == DEATHS_OF_ROW - 1}
        self.suspects -= self.left_out
        return new

    @property
    def isolates(self) -> bool:
        """Return True if there are rows that must run alone."""
        return bool(self.suspects or self.left_out)

    def concern(self, rows: Collection[Uid]) -> bool:
        """Return True if one of these rows must run alone."""
        return not (self.suspects.isdisjoint(rows) and self.left_out.isdisjoint(rows))

    def passes(self, rows: Sequence[Uid]) -> list[list[int]]:
        """Return the positions of the rows that run together: all that are not suspects, then each suspect alone."""
        together = [position for position, row in enumerate(rows) if row not in self.suspects]
        alone = [[position] for position, row in enumerate(rows) if row in self.suspects]
        return [together, *alone] if together else alone

    def isolated(self) -> Isolated:
        """Return the record that other processes need."""
        return sorted(self.suspects), sorted(self.left_out)

    def learn(self, isolated: Isolated) -> None:
        """Add the record of another process."""
        self.suspects, self.left_out = ({(row[0], row[1], row[2]) for row in rows} for rows in isolated)

    def frequent(self) -> str:
        """Return the end of a message, with the rows that several lost processes had; empty if there are none."""
        rows = [row for (_, row), count in self.counts.most_common(NAMED) if count >= DEATHS_OF_ROW]
        return f"; rows (source, group, sample) that {DEATHS_OF_ROW} or more lost processes had: {rows}" if rows else ""


def skipped_row_line(row: Uid, processes: str, end: str) -> str:
    """Return the log line about a skipped row; `end` describes how the last process ended."""
    return (
        f"row {tuple(row)} (source, group, sample) is left out: {DEATHS_OF_ROW} {processes} have ended with it, the "
        f"last while it ran alone ({end}); it stays without a response"
    )
