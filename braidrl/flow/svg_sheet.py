"""Where everything stands on the sheet of an SVG drawing: the flow's stages and labels as ranks, with tops and bottoms.

rank 0        (admission)
rank 1          prompt            one label for each writer and set of columns, whoever reads them
rank 2     [actor.generate]
rank 3     tokens   tokens, ...
rank 4     [...]      [...]       side by side: may run at the same time
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from braidrl.flow.captions import about, versioned
from braidrl.flow.columns import ADMISSION, ColumnVersion, version_numbers
from braidrl.flow.flow import Edge, Flow
from braidrl.flow.layering import Layout, Node, place

BOX_HEIGHT, LABEL_LINE, LABEL_PAD = 50, 15, 6
NAME_CHARACTER, SMALL_CHARACTER, LABEL_CHARACTER = 7.8, 6.2, 6.8
BOX_GAP, BEND = 24, 10
LEFT, TOP, MARGIN, BOTTOM, LANE = 116, 88, 40, 66, 28
LABEL_WIDTH = 22


@dataclass(frozen=True)
class Bundle:
    """What several readers take from one writer: one label, one trunk."""

    source: str
    lines: tuple[str, ...]
    targets: tuple[str, ...]
    is_order: bool


class Sheet:
    """The places of one flow's parts; all lengths in pixels, the origin at the top left."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.boxes = {ADMISSION: Node(0, 130, ADMISSION)}
        for stage in flow.stages:
            width = 30 + max(NAME_CHARACTER * len(stage.name), SMALL_CHARACTER * len(about(stage)))
            self.boxes[stage.name] = Node(2 * flow.depth[stage.name], width, stage.name)
        self.labels: dict[Node, Bundle] = {}
        links: dict[Node, list[Node]] = defaultdict(list)
        for bundle in bundles(flow):
            source = self.boxes[bundle.source]
            label = Node(source.rank + 1, 12 + LABEL_CHARACTER * max(map(len, bundle.lines)), "label")
            self.labels[label] = bundle
            links[source].append(label)
            links[label] = [self.boxes[name] for name in bundle.targets]
        self.layout: Layout = place([*self.boxes.values(), *self.labels], links, BOX_GAP, BEND)
        # Each role whose changed weights another stage uses has a lane of its own beside the drawing.
        self.lanes = list(dict.fromkeys(edge.weights for edge in flow.edges if edge.weights))
        self._measure()

    def _measure(self) -> None:
        spans: dict[int, float] = defaultdict(float)
        for above, below in self.layout.lines:
            spans[above.rank] = max(spans[above.rank], abs(above.x - below.x))
        for node in (node for rank in self.layout.ranks for node in rank):
            node.x += LEFT
        self.tops: list[float] = []
        self.bottoms: list[float] = []
        y = float(TOP)
        for rank, nodes in enumerate(self.layout.ranks):
            self.tops.append(y)
            self.bottoms.append(y + max((self.height(node) for node in nodes), default=0))
            # Lines that go far to the side need room to do so gently.
            y = self.bottoms[rank] + min(28 + 0.12 * spans[rank], 96)
        self.right = max(node.x + node.width / 2 for rank in self.layout.ranks for node in rank)
        self.width = self.right + MARGIN + LANE * len(self.lanes)
        self.height_total = self.bottoms[-1] + BOTTOM

    def height(self, node: Node) -> float:
        """Of a box or a label; a bend has none."""
        if node in self.labels:
            return LABEL_LINE * len(self.labels[node].lines) + LABEL_PAD
        return BOX_HEIGHT if node.name else 0

    def top(self, node: Node) -> float:
        return self.tops[node.rank]

    def bottom(self, node: Node) -> float:
        """Where lines leave a node: the lower edge of a box, the lower end of the rank for what stands above it."""
        return self.bottoms[node.rank]

    def lane(self, role: str) -> float:
        """The x of the lane in which a role's weights travel."""
        return self.right + 8 + LANE * (0.5 + self.lanes.index(role))

    def open_to_the_right(self, node: Node) -> bool:
        """True if nothing stands between the node and the lanes."""
        return self.layout.ranks[node.rank][-1] is node

    def ports(self) -> dict[tuple[Node, Node], tuple[float, float]]:
        """For each line, the x where it leaves the upper node and where it enters the lower one."""
        leaving: dict[Node, list[Node]] = defaultdict(list)
        entering: dict[Node, list[Node]] = defaultdict(list)
        for above, below in self.layout.lines:
            leaving[above].append(below)
            entering[below].append(above)
        return {
            (above, below): (port(above, below, leaving[above]), port(below, above, entering[below]))
            for above, below in self.layout.lines
        }


def port(node: Node, other: Node, others: Sequence[Node]) -> float:
    """Where on a box the line to `other` ends, among all on that side from left to right; labels and bends have one place."""
    if node.name in ("", "label"):
        return node.x
    step = min(26.0, (node.width - 36) / max(len(others) - 1, 1))
    place_of = sorted(others, key=lambda n: n.x).index(other)
    return node.x + step * (place_of - (len(others) - 1) / 2)


def bundles(flow: Flow) -> list[Bundle]:
    """The edges of columns and of order, those of one source with the same label joined."""
    joined: dict[tuple[str, tuple[str, ...], bool], list[str]] = defaultdict(list)
    versions = version_numbers(flow.stages)
    for edge in flow.edges:
        if not edge.weights:
            names = [versioned(ColumnVersion(name, edge.source), versions) for name in edge.columns]
            lines = wrapped(names or [order_label(edge, flow)])
            joined[edge.source, tuple(lines), not edge.columns].append(edge.target)
    return [Bundle(source, lines, tuple(targets), order) for (source, lines, order), targets in joined.items()]


def order_label(edge: Edge, flow: Flow) -> str:
    return "after" if edge.source in flow[edge.target].after else "kept rows"


def wrapped(names: Sequence[str]) -> list[str]:
    """Names joined into lines of about `LABEL_WIDTH` characters."""
    lines = [names[0]]
    for name in names[1:]:
        if len(lines[-1]) + len(name) + 2 <= LABEL_WIDTH:
            lines[-1] += f", {name}"
        else:
            lines[-1] += ","
            lines.append(name)
    return lines
