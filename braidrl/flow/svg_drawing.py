"""A flow as SVG: stages by depth from top to bottom, columns written on the lines, weights dashed in lanes at the side."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from braidrl.flow.captions import about, heading
from braidrl.flow.columns import ADMISSION
from braidrl.flow.flow import Flow, touched_weights, written_weights
from braidrl.flow.layering import Node
from braidrl.flow.stage import Kind, Stage
from braidrl.flow.svg_sheet import BOX_HEIGHT, LABEL_LINE, LEFT, MARGIN, Sheet

# Fill, line and text of each kind.
COLOURS = {
    Kind.GENERATE: ("#fff4dd", "#e0a33a", "#754c08"),
    Kind.INFER: ("#e7f1fd", "#5a97db", "#1d4c85"),
    Kind.COMPUTE: ("#e9f7ee", "#57aa72", "#1e5e36"),
    Kind.SELECT: ("#f2ecfd", "#9570d3", "#4d2e88"),
    Kind.TRAIN: ("#fdeaed", "#db6676", "#862333"),
}
GREY = ("#f3f5f7", "#a3abb6", "#4a525c")
SANS = "font-family:Inter,'Segoe UI','Helvetica Neue',Arial,'DejaVu Sans',sans-serif"
MONO = "font-family:'JetBrains Mono',SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
STYLE = f"""<style>
.title {{ {SANS}; font-size:20px; font-weight:650; fill:#1d232b }}
.name {{ {SANS}; font-size:13px; font-weight:600; text-anchor:middle }}
.about {{ {SANS}; font-size:10.5px; text-anchor:middle; opacity:.8 }}
.small {{ {SANS}; font-size:11px; fill:#7a838f }}
.depth {{ {SANS}; font-size:13px; font-weight:600; fill:#9aa3af }}
.columns {{ {MONO}; font-size:11px; text-anchor:middle; fill:#3d4650 }}
.order {{ {SANS}; font-size:11px; font-style:italic; text-anchor:middle; fill:#6d4fb0 }}
.line {{ fill:none; stroke:#a7b0bc; stroke-width:1.4 }}
.orderline {{ fill:none; stroke:#b9a3e3; stroke-width:1.4 }}
.weights {{ fill:none; stroke:#db6676; stroke-width:1.5; stroke-dasharray:5 4 }}
.lane {{ {SANS}; font-size:11px; fill:#b34355; text-anchor:middle }}
</style>
<defs>
<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0.6 L8 4 L0 7.4 z" fill="#a7b0bc"/></marker>
<marker id="orderarrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0.6 L8 4 L0 7.4 z" fill="#b9a3e3"/></marker>
<marker id="weightarrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0.6 L8 4 L0 7.4 z" fill="#db6676"/></marker>
</defs>"""


def svg(flow: Flow) -> str:
    """The drawing as a text of SVG, complete in itself."""
    sheet = Sheet(flow)
    size = f'width="{sheet.width:.0f}" height="{sheet.height_total:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {sheet.width:.0f} {sheet.height_total:.0f}">',
        f"<title>{escape(flow.name)}</title>",
        STYLE,
        *background(sheet),
        *waves(sheet),
        *column_lines(sheet),
        *weight_lines(sheet),
        *labels(sheet),
        *boxes(sheet),
        *legend(sheet),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def background(sheet: Sheet) -> list[str]:
    """The sheet, its heading, and a band behind each depth."""
    parts = [
        f'<rect width="{sheet.width:.0f}" height="{sheet.height_total:.0f}" rx="12" fill="#ffffff"/>',
        words(MARGIN, 40, "title", sheet.flow.name),
        words(MARGIN, 60, "small", heading(sheet.flow)),
    ]
    for rank in range(2, len(sheet.tops), 2):
        top, height = sheet.tops[rank] - 10, BOX_HEIGHT + 20
        width = sheet.right - MARGIN + 16
        parts.append(
            f'<rect x="{MARGIN - 8}" y="{top:.1f}" width="{width:.1f}" height="{height}" rx="10" fill="#f7f8fa"/>'
        )
        several = sum(bool(node.name) for node in sheet.layout.ranks[rank]) > 1
        middle = top + height / 2 + (-2 if several else 5)
        parts.append(words(MARGIN + 4, middle, "depth", str(rank // 2)))
        if several:
            parts.append(words(MARGIN + 4, middle + 15, "small", "in parallel"))
    return parts


def waves(sheet: Sheet) -> list[str]:
    """A bracket beside the stages that run again until enough groups are kept."""
    ranks = [sheet.boxes[stage.name].rank for stage in sheet.flow.sampling_segment]
    if not ranks:
        return []
    top, bottom = sheet.tops[min(ranks)] - 10, sheet.bottoms[max(ranks)] + 10
    x = MARGIN - 14
    turn = f"translate({x - 8} {(top + bottom) / 2:.1f}) rotate(-90)"
    return [
        f'<path class="orderline" d="M{x + 5} {top:.1f} H{x} V{bottom:.1f} H{x + 5}"/>',
        f'<text class="order" transform="{turn}">in waves, until enough groups are kept</text>',
    ]


def column_lines(sheet: Sheet) -> list[str]:
    """From writers through labels to readers; what passes a rank goes straight down in the place kept for it."""
    trunks: dict[Node, bool] = {label: bundle.is_order for label, bundle in sheet.labels.items()}
    ports = sheet.ports()
    parts = []
    for above, below in sheet.layout.lines:
        is_order = trunks.get(above, trunks.get(below, False))
        if not below.name:
            trunks[below] = is_order
        x, into = ports[above, below]
        start, end = sheet.tops[above.rank] + sheet.height(above), sheet.top(below)
        level = sheet.bottom(above)
        bow = (end - level) * 0.55
        path = f"M{x:.1f} {start:.1f} V{level:.1f} C{x:.1f} {level + bow:.1f} {into:.1f} {end - bow:.1f} {into:.1f} {end:.1f}"
        arrow = f' marker-end="url(#{"orderarrow" if is_order else "arrow"})"' if below in sheet.boxes.values() else ""
        parts.append(f'<path class="{"orderline" if is_order else "line"}" d="{path}"{arrow}/>')
    return parts


def weight_lines(sheet: Sheet) -> list[str]:
    """From each update down its role's lane and back up to those who use the weights next."""
    parts = []
    for role in sheet.lanes:
        ways = {}
        for stage in sheet.flow.stages:
            writes = role in written_weights(stage)
            if writes or role in touched_weights(stage):
                ways[stage.name, writes] = way_out(sheet, sheet.boxes[stage.name], role, above=not writes)
        ends = [points[-1][1] for points in ways.values()]
        low, high, lane = min(ends), max(ends), sheet.lane(role)
        source = next(points[-1][1] for (_, writes), points in ways.items() if writes)
        for (_, writes), points in ways.items():
            y = points[-1][1]
            # Round the corner towards where the line goes on.
            onward = 1 if y == low or (y != high and y < source) else -1
            corner = [*points, (lane, y + 8 * onward)] if low < high else points
            arrow = "" if writes else ' marker-end="url(#weightarrow)"'
            parts.append(f'<path class="weights" d="{rounded(corner if writes else corner[::-1])}"{arrow}/>')
        parts.append(f'<path class="weights" d="M{lane:.1f} {low + 8:.1f} V{high - 8:.1f}"/>')
        turn = f"translate({lane + 13:.1f} {(low + high) / 2:.1f}) rotate(90)"
        parts.append(f'<text class="lane" transform="{turn}">{escape(role)} weights</text>')
    return parts


def way_out(sheet: Sheet, node: Node, role: str, above: bool = False) -> list[tuple[float, float]]:
    """Corner points from a box to the lane: straight to the right where nothing is in the way, else through the gap beside it."""
    lane, number = sheet.lane(role), sheet.lanes.index(role)
    right, middle = node.x + node.width / 2, sheet.top(node) + BOX_HEIGHT / 2 + 7 * number
    if sheet.open_to_the_right(node):
        return [(right, middle), (lane, middle)]
    x = right - 14 - 9 * number
    edge, gap = (sheet.top(node), -14 - 5 * number) if above else (sheet.top(node) + BOX_HEIGHT, 15 + 5 * number)
    return [(x, edge), (x, edge + gap), (lane, edge + gap)]


def rounded(points: Sequence[tuple[float, float]], radius: float = 7) -> str:
    """A path through the points, its corners (all right angles) rounded."""
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for before, (x, y), after in zip(points, points[1:], points[2:], strict=False):
        start, end = towards((x, y), before, radius), towards((x, y), after, radius)
        path += f" L{start[0]:.1f} {start[1]:.1f} Q{x:.1f} {y:.1f} {end[0]:.1f} {end[1]:.1f}"
    return path + f" L{points[-1][0]:.1f} {points[-1][1]:.1f}"


def towards(corner: tuple[float, float], other: tuple[float, float], distance: float) -> tuple[float, float]:
    """The point at `distance` from a corner on the way to another point."""
    length = max(abs(other[0] - corner[0]) + abs(other[1] - corner[1]), 1e-9)
    part = min(distance / length, 0.5)
    return corner[0] + (other[0] - corner[0]) * part, corner[1] + (other[1] - corner[1]) * part


def labels(sheet: Sheet) -> list[str]:
    """The names of the columns, on a chip that covers the line behind them."""
    parts = []
    for node, bundle in sheet.labels.items():
        left, top = node.x - node.width / 2, sheet.top(node)
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{node.width:.1f}" height="{sheet.height(node):.1f}" rx="6" '
            'fill="#ffffff" stroke="#e3e7ec"/>'
        )
        style = "order" if bundle.is_order else "columns"
        parts += [words(node.x, top + LABEL_LINE * (i + 1), style, line) for i, line in enumerate(bundle.lines)]
    return parts


def boxes(sheet: Sheet) -> list[str]:
    """The stages, coloured by kind, and admission."""
    parts = []
    for name, node in sheet.boxes.items():
        stage = None if name == ADMISSION else sheet.flow[name]
        fill, line, ink = COLOURS[stage.kind] if stage else GREY
        left, top = node.x - node.width / 2, sheet.top(node)
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{node.width:.1f}" height="{BOX_HEIGHT}" '
            f'rx="{10 if stage else BOX_HEIGHT / 2}" fill="{fill}" stroke="{line}" stroke-width="1.4"/>'
        )
        parts.append(words(node.x, top + 22, "name", name, ink))
        parts.append(words(node.x, top + 38, "about", caption(stage), ink))
    return parts


def caption(stage: Stage | None) -> str:
    return about(stage) if stage else "rows from the data"


def legend(sheet: Sheet) -> list[str]:
    """The colours in use, and the dashes."""
    x, y = float(LEFT), sheet.height_total - 26
    parts = []
    for kind in (kind for kind in Kind if any(stage.kind is kind for stage in sheet.flow.stages)):
        fill, line, _ = COLOURS[kind]
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="14" height="12" rx="3.5" fill="{fill}" stroke="{line}"/>'
        )
        parts.append(words(x + 20, y, "small", kind.value))
        x += 36 + 6.2 * len(kind.value)
    if sheet.lanes:
        parts.append(f'<path class="weights" d="M{x:.1f} {y - 4:.1f} h26"/>')
        parts.append(words(x + 32, y, "small", "weights, for their next use"))
    return parts


def words(x: float, y: float, style: str, text: str, colour: str | None = None) -> str:
    """A text element."""
    fill = f' style="fill:{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}"{fill}>{escape(text)}</text>'
