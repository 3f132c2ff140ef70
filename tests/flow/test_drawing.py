"""The drawings hold everything, and nothing lies on anything else."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.flow import Flow, actor, cost, cost_critic, critic, loss, reference, reward
from braidrl.flow.drawing import svg, text
from braidrl.flow.layering import Node, isotonic, place
from braidrl.flow.svg_sheet import Sheet
from tests.flow.flows import filtered, grpo, ppo


def crowded() -> Flow:
    """Many roles side by side, two namespaces, every kind of edge."""
    generate, score, ref, values, *rest = ppo(old="recompute").stages[:1] + ppo().stages[1:]
    value_loss = {"loss": loss.squared_value(), "aggregate": "mean-of-all"}
    stages = [
        generate,
        actor.generate(into="greedy"),
        score,
        cost.score(),
        ref,
        values,
        cost_critic.values(after=["reward.score"]),
        reward.verify(of="greedy"),
        *rest,
        critic.update(**value_loss),
        reference.update(source=actor, decay=0.9),
    ]
    return Flow("crowded & <wide>", stages)


FLOWS = {"grpo": grpo, "filtered": filtered, "ppo": lambda: ppo(old="recompute"), "crowded": crowded}
each_flow = pytest.mark.parametrize("make", FLOWS.values(), ids=FLOWS)


def words(root):
    return " ".join(element.text or "" for element in root.iter() if element.tag.endswith("text"))


@each_flow
def test_svg_is_well_formed_and_names_every_stage_and_every_column_that_is_read(make):
    flow = make()
    drawn = words(ElementTree.fromstring(svg(flow)))
    for stage in flow.stages:
        assert stage.name in drawn
        for column in flow.inputs[stage.name]:
            assert column.name in drawn, f"{column} of {stage.name}"


@each_flow
def test_boxes_and_labels_do_not_overlap(make):
    sheet = Sheet(make())
    for rank in sheet.layout.ranks:
        for left, right in pairwise(rank):
            assert left.x + left.width / 2 < right.x - right.width / 2
    for i, (bottom, top) in enumerate(zip(sheet.bottoms, sheet.tops[1:], strict=False)):
        assert bottom < top, f"rank {i} reaches into the next"
    for node in (*sheet.boxes.values(), *sheet.labels):
        assert node.x - node.width / 2 > 0
        assert node.x + node.width / 2 < sheet.width


@each_flow
def test_lines_run_only_between_neighbouring_ranks_and_reach_every_reader(make):
    sheet = Sheet(make())
    below = {}
    for above, node in sheet.layout.lines:
        assert node.rank == above.rank + 1
        below.setdefault(above, []).append(node)

    def reached(node):
        if node in sheet.boxes.values():
            return {node.name}
        return set().union(*(reached(other) for other in below[node]))

    for label, bundle in sheet.labels.items():
        assert reached(label) == set(bundle.targets)


def test_weights_are_dashed_and_there_only_where_they_are_used_again():
    def dashed(flow):
        root = ElementTree.fromstring(svg(flow))
        return [e for e in root.iter() if e.get("class") == "weights" and e.get("marker-end")]

    assert len(dashed(ppo())) == 2, "to actor.generate and to critic.values"
    assert len(dashed(Flow("one", [actor.generate(), reward.verify()]))) == 0


def test_drawing_is_the_same_each_time():
    assert svg(crowded()) == svg(crowded())


def test_text_shows_what_runs_in_parallel_and_which_version_is_read():
    shown = text(filtered())
    assert "reads  reward²" in shown
    assert "reads  reward³" in shown
    assert "in waves until enough groups are kept" in shown
    parallel = [line for line in text(ppo()).splitlines() if line[4:5] in ("┌", "├")]
    assert [line.split()[-4] for line in parallel] == [
        "reward.score", "reference.log_probs", "critic.values", "critic.update", "actor.update",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 110, 160])
def test_text_keeps_to_its_width(width):
    for make in FLOWS.values():
        assert max(map(len, text(make(), width).splitlines())) <= width


@given(st.lists(st.lists(st.floats(10, 200), min_size=1, max_size=5), min_size=2, max_size=5), st.data())
def test_no_layered_graph_makes_nodes_overlap(widths, data):
    nodes = [Node(rank, width, f"{rank}") for rank, row in enumerate(widths) for width in row]
    links = {}
    for node in nodes:
        lower = [other for other in nodes if other.rank > node.rank]
        if lower:
            links[node] = data.draw(st.lists(st.sampled_from(lower), max_size=3, unique=True))
    layout = place(nodes, links, gap=5, bend=4)
    for rank in layout.ranks:
        for left, right in pairwise(rank):
            assert right.x - left.x >= (left.width + right.width) / 2 + 5 - 1e-6


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(0.5, 4)), min_size=1, max_size=8))
def test_isotonic_values_never_fall_and_keep_their_weighted_sum(pairs):
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]
    found = isotonic(values, weights)
    assert all(a <= b + 1e-9 for a, b in pairwise(found))
    assert sum(v * w for v, w in zip(found, weights, strict=True)) == pytest.approx(
        sum(v * w for v, w in pairs), abs=1e-6
    )
    assert isotonic(sorted(values), weights) == sorted(values)
