"""Cases compared by one number: the ratio of Braid to each peer, and each side's share of the floor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from benchmarks.case import Case, Found, Rates

COLUMNS = [
    ("tokens_per_second", "tokens/s", ".0f"),
    ("images_per_second", "images/s", ".1f"),
    ("tokens_per_cpu_second", "per CPU s", ".0f"),
    ("seconds", "seconds", ".2f"),
    ("fraction_of_floor", "of floor", ".0%"),
    ("peak_mebibytes", "peak MiB", ".0f"),
]


@dataclass(frozen=True)
class Comparison(Case):
    """A case with `goals`: (side, other side, the ratio that the first must reach over the second)."""

    goals: list[tuple[str, str, float]] = field(default_factory=list)
    floor: Callable[[str, Rates], float] | None = None
    """Returns the least possible seconds for a dtype, from the machine's rates."""
    measure: str = "tokens_per_second"
    """Name of the compared number. For `peak_mebibytes` less is better, for all others more."""

    @property
    def needs_rates(self) -> bool:
        return self.floor is not None

    def only(self, dtypes: Collection[str]) -> Self:
        case = super().only(dtypes)
        names = [side.name for side in case.sides]
        return replace(case, goals=[goal for goal in self.goals if goal[0] in names and goal[1] in names])

    def summary(self, found: Found, rates: Rates) -> dict[str, Any]:
        sides = {name: dict(numbers) for name, numbers in found.items()}
        if self.floor is not None:
            for side in self.sides:
                numbers = sides[side.name]
                numbers["floor_seconds"] = self.floor(side.case["dtype"], rates)
                numbers["fraction_of_floor"] = numbers["floor_seconds"] / numbers["seconds"]
        return {"compared": self.measure, "sides": sides, "ratios": [self._ratio(found, *goal) for goal in self.goals]}

    def _ratio(self, found: Found, ours: str, theirs: str, goal: float) -> dict[str, Any]:
        times = found[ours][self.measure] / found[theirs][self.measure]
        times = 1 / times if self.measure == "peak_mebibytes" else times
        return {"ours": ours, "theirs": theirs, "times": round(times, 2), "goal": goal, "reached": times >= goal}

    def table(self, summary: Mapping[str, Any]) -> str:
        lines = [f"  {'':24}" + "".join(f"{title:>10}" for _, title, _ in COLUMNS)]
        for name, side in summary["sides"].items():
            cells = (f"{side[key]:{form}}" if key in side else "" for key, _, form in COLUMNS)
            lines.append(f"  {name:24}" + "".join(f"{cell:>10}" for cell in cells))
        for ratio in summary["ratios"]:
            mark = "" if ratio["reached"] else "   SHORT"
            lines.append(
                f"  {ratio['ours']} over {ratio['theirs']}: {ratio['times']:.2f} times, goal {ratio['goal']}{mark}"
            )
        return "\n".join(lines)
