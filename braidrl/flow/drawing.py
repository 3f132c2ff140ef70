"""Drawings of a flow: text for a terminal, the same text as SVG, and a Mermaid flowchart."""

import io
import re
import textwrap

from rich.console import Console

from braidrl.flow.columns import ADMISSION, ADMITTED, ADMITTED_IF_GIVEN, ColumnVersion
from braidrl.flow.flow import Edge, Flow, touched_weights
from braidrl.flow.stage import ALWAYS, Kind, Scope, Stage

SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
SCOPES = {Scope.GROUP: "whole groups", Scope.BATCH: "sums over the batch"}
COLOURS = {
    Kind.GENERATE: "#fff4dd",
    Kind.INFER: "#e7f1fd",
    Kind.COMPUTE: "#e9f7ee",
    Kind.SELECT: "#f2ecfd",
    Kind.TRAIN: "#fdeaed",
}

WIDTH = 110


def text(flow: Flow, width: int = WIDTH) -> str:
    """Return the stages by depth with their inputs and outputs; a bracket joins stages that may run together."""
    models = [f"{role} (trained)" if role in flow.trained_roles else role for role in flow.roles]
    heading = f"{flow.name}: {len(flow.stages)} stages; models: {', '.join(models) or 'none'}"
    indent = max(len(stage.name) for stage in flow.stages)
    lines, numbered = [*textwrap.wrap(heading, width), ""], numbered_columns(flow)
    at_once = [[s for s in flow.stages if flow.depth[s.name] == d] for d in range(1, max(flow.depth.values()) + 1)]
    for depth, group in enumerate(at_once, 1):
        rows: list[tuple[str, str]] = []  # the name, in the first line of a stage, and details
        for stage in group:
            reads = [numbered.get(column, column.name) for column in flow.inputs[stage.name]]
            writes = [numbered.get(ColumnVersion(name, stage.name), name) for name in stage.writes]
            waits = [f"{e.source} ({reason(e, flow)})" for e in flow.edges if e.target == stage.name and not e.columns]
            rows.append((stage.name, about(stage)))
            for label, names in (("reads  ", reads), ("writes ", writes), ("waits for ", waits)):
                words = label + ", ".join(names) if names else ""
                wrapped = textwrap.wrap(words, width - indent - 8, subsequent_indent=" " * len(label))
                rows += [("", line) for line in wrapped]
        for i, (name, detail) in enumerate(rows):
            number = f"{depth:>3}" if i == 0 else "   "
            mark = " "
            if len(group) > 1:
                mark = "┌" if i == 0 else "└" if i == len(rows) - 1 else "├" if name else "│"
            lines.append(f"{number} {mark} {name:<{indent}}  {detail}")
    notes = []
    if any(len(group) > 1 for group in at_once):
        notes.append("┌ └  these may run at the same time")
    if numbered:
        notes.append(f"¹ ²  versions of one column: {', '.join(dict.fromkeys(column.name for column in numbered))}")
    if flow.sampling_segment:
        notes.append(f"The stages up to {flow.sampling_segment[-1].name} run in waves until enough groups are kept.")
    return "\n".join([*lines, "", *(line for note in notes for line in textwrap.wrap(note, width))]).rstrip()


def numbered_columns(flow: Flow) -> dict[ColumnVersion, str]:
    """Return a column's name with its version, as in `reward²`, for each column that has several versions."""
    writers: dict[str, list[str]] = {name: [ADMISSION] for name in (*ADMITTED, *ADMITTED_IF_GIVEN)}
    for stage in flow.stages:
        for name in stage.writes:
            writers.setdefault(name, []).append(stage.name)
    return {
        ColumnVersion(name, writer): name + str(number).translate(SUPERSCRIPTS)
        for name, all_writers in writers.items()
        if len(all_writers) > 1
        for number, writer in enumerate(all_writers, 1)
    }


def reason(edge: Edge, flow: Flow) -> str:
    if edge.weights:
        return f"weights of {edge.weights}"
    return "after" if edge.source in flow[edge.target].after else "kept rows"


def about(stage: Stage) -> str:
    """Return the kind and role of a stage, and its scope, state and `when` if they differ from the default."""
    parts = [
        stage.kind.value,
        stage.role,
        SCOPES.get(stage.scope),
        f"keeps {', '.join(stage.state)}" if stage.state else None,
        str(stage.when) if stage.when != ALWAYS else None,
    ]
    return " · ".join(part for part in parts if part)


def svg(flow: Flow) -> str:
    """Return `text` as a self-contained SVG picture."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(text(flow, WIDTH), markup=False, highlight=False, no_wrap=True)
    # rich's SVG refers to a font on the network.
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=flow.name), flags=re.DOTALL)


def mermaid(flow: Flow) -> str:
    """Return the flow as a Mermaid flowchart: solid lines for columns, dotted lines for order and trained weights."""
    nodes = {ADMISSION: "prompts"} | {stage.name: f"stage{i}" for i, stage in enumerate(flow.stages, 1)}
    lines = ["flowchart TD", '    prompts(["prompts"])']
    lines += [f'    {nodes[s.name]}["{label(s.name)}<br/>{label(about(s))}"]:::{s.kind.value}' for s in flow.stages]
    numbered, sent = numbered_columns(flow), dict[tuple[str, str], list[str]]()
    for reader, columns in flow.inputs.items():
        for column in columns:
            sent.setdefault((column.writer, reader), []).append(numbered.get(column, column.name))
    for (writer, reader), names in sent.items():
        lines.append(f'    {nodes[writer]} -->|"{label(", ".join(names))}"| {nodes[reader]}')
    for edge in flow.edges:
        if not edge.columns and not edge.weights:
            lines.append(f'    {nodes[edge.source]} -.->|"{label(reason(edge, flow))}"| {nodes[edge.target]}')
    trained = [(stage, stage.role) for stage in flow.stages if stage.kind is Kind.TRAIN and stage.role]
    for update, role in trained:
        users = [s for s in flow.stages if role in touched_weights(s) and (s, role) not in trained]
        lines += [f'    {nodes[update.name]} -.->|"{label(role)} weights"| {nodes[user.name]}' for user in users]
    kinds = dict.fromkeys(stage.kind for stage in flow.stages)
    return "\n".join([*lines, *(f"    classDef {kind.value} fill:{COLOURS[kind]},color:#222" for kind in kinds)])


def label(name: str) -> str:
    """Escape a text for quotes in Mermaid."""
    return name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "#quot;")
