"""A flow for the eye: as text for a terminal here, as SVG in `svg_drawing`."""

from __future__ import annotations

import textwrap

from braidrl.flow.captions import about, heading, versioned
from braidrl.flow.columns import ColumnVersion, version_numbers
from braidrl.flow.flow import Edge, Flow
from braidrl.flow.planner import parallel_groups
from braidrl.flow.stage import Stage
from braidrl.flow.svg_drawing import svg

__all__ = ["svg", "text"]

WIDTH = 110


def text(flow: Flow, width: int = WIDTH) -> str:
    """The stages by depth with what each reads and writes; a bracket joins those that may run at the same time."""
    indent = max(len(stage.name) for stage in flow.stages)
    lines = [*textwrap.wrap(f"{flow.name}: {heading(flow)}", width), ""]
    for depth, group in enumerate(parallel_groups(flow), 1):
        rows = [row for stage in group for row in stage_rows(flow, stage, width - indent - 8)]
        for i, (name, detail) in enumerate(rows):
            number = f"{depth:>3}" if i == 0 else "   "
            mark = bracket(i == 0, i == len(rows) - 1, bool(name)) if len(group) > 1 else " "
            lines.append(f"{number} {mark} {name:<{indent}}  {detail}")
    notes = [line for note in footnotes(flow) for line in textwrap.wrap(note, width)]
    return "\n".join([*lines, "", *notes]).rstrip()


def bracket(first: bool, last: bool, begins: bool) -> str:
    """The sign before a line of stages that may run at the same time; `begins` where a stage does."""
    if first or last:
        return "┌" if first else "└"
    return "├" if begins else "│"


def stage_rows(flow: Flow, stage: Stage, width: int) -> list[tuple[str, str]]:
    """What stands in the left column and in the right one, line by line."""
    versions = version_numbers(flow.stages)
    reads = [versioned(column, versions) for column in flow.inputs[stage.name]]
    writes = [versioned(ColumnVersion(name, stage.name), versions) for name in stage.writes]
    waits = [f"{e.source} ({reason(e, flow)})" for e in flow.edges if e.target == stage.name and not e.columns]
    details = [about(stage)]
    for label, names in (("reads  ", reads), ("writes ", writes), ("waits for ", waits)):
        if names:
            details += textwrap.wrap(label + ", ".join(names), width, subsequent_indent=" " * len(label))
    return [(stage.name if i == 0 else "", detail) for i, detail in enumerate(details)]


def reason(edge: Edge, flow: Flow) -> str:
    """Why an edge without columns is there."""
    if edge.weights:
        return f"weights of {edge.weights}"
    return "after" if edge.source in flow[edge.target].after else "kept rows"


def footnotes(flow: Flow) -> list[str]:
    """What the signs mean, as far as they occur."""
    notes = []
    if any(len(group) > 1 for group in parallel_groups(flow)):
        notes.append("┌ └  these may run at the same time")
    if versions := version_numbers(flow.stages):
        notes.append(f"¹ ²  versions of one column: {', '.join(dict.fromkeys(column.name for column in versions))}")
    if flow.sampling_segment:
        notes.append(f"The stages up to {flow.sampling_segment[-1].name} run in waves until enough groups are kept.")
    return notes
