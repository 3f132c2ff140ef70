"""Cost of planning a change of layout for one rank of 1,024, with the 771 tensors of a 32B model; see
`sides/resharding_braid.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.case import Case, Found, Rates
from benchmarks.duel import Side

LAYOUTS = (
    "FSDP",
    "tensor",
    "pipeline",
    "tensor and FSDP",
    "pipeline and tensor",
    "pipeline and FSDP",
    "pipeline, tensor and FSDP",
)
RANKS = (0, 517)


@dataclass(frozen=True)
class PlanningCase(Case):
    """Several ranks of one pair of layouts, each in a separate process."""

    def summary(self, found: Found, rates: Rates) -> dict[str, Any]:
        return {
            side: {key: number for key, number in of_side.items() if key != "turns"} for side, of_side in found.items()
        }

    def table(self, summary: Mapping[str, Any]) -> str:
        lines = [f"{'':12}{'seconds':>9}{'MB':>8}{'moves':>10}{'GB received':>13}{'rounds':>8}{'least':>7}"]
        for side, n in summary.items():
            cells = f"{n['seconds']:9.2f}{n['bytes'] / 1e6:8.0f}{n['moves']:10.0f}{n['received'] / 1e9:13.2f}"
            lines.append(f"{side:12}{cells}{n['rounds']:8.0f}{n['least_rounds']:7.0f}")
        return "\n".join(lines)


def planning() -> list[Case]:
    """Return the cases: from each training layout to slices over 8 or 4 ranks."""
    return [
        PlanningCase(
            layouts,
            [Side(f"rank {rank}", "resharding_braid", {"layouts": layouts, "rank": rank}) for rank in RANKS],
            3,
            1,
            at_once=False,
        )
        for layouts in LAYOUTS
    ]
