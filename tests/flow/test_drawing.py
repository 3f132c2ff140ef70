"""The drawings contain every stage and edge."""

import xml.etree.ElementTree as ElementTree

import pytest

from braidrl.flow import Flow, actor, cost, cost_critic, critic, loss, reference, reward
from braidrl.flow.drawing import mermaid, svg, text
from tests.flow.flows import filtered, grpo, ppo


def crowded() -> Flow:
    """Return a flow with many roles side by side, two namespaces, and every kind of edge."""
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


@each_flow
def test_mermaid_draws_a_labelled_edge_from_every_writer_to_every_reader(make):
    flow = make()
    lines = mermaid(flow).splitlines()
    assert lines[0] == "flowchart TD"
    nodes = {"admission": "prompts"} | {s.name: f"stage{i}" for i, s in enumerate(flow.stages, 1)}
    for stage in flow.stages:
        assert any(line.strip().startswith(f'{nodes[stage.name]}["{stage.name}<br/>') for line in lines)
        for column in flow.inputs[stage.name]:
            ends = f"{nodes[column.writer]} -->|", f"| {nodes[stage.name]}"
            (drawn,) = [line for line in lines if line.strip().startswith(ends[0]) and line.endswith(ends[1])]
            assert column.name in drawn


def test_mermaid_draws_weights_only_to_later_uses():
    def weights(flow):
        return [line.split("| ")[-1] for line in mermaid(flow).splitlines() if "weights" in line]

    assert weights(ppo()) == ["stage4", "stage1"], "edges to critic.values and to actor.generate"
    assert weights(Flow("one", [actor.generate(), reward.verify()])) == []


def test_svg_shows_every_line_of_the_text_and_fetches_nothing():
    drawn = svg(crowded())
    shown = "".join(element.text or "" for element in ElementTree.fromstring(drawn).iter())
    for line in text(crowded()).splitlines():
        assert "".join(line.split()) in "".join(shown.split())
    assert "url(http" not in drawn and drawn == svg(crowded())


def test_text_shows_parallel_stages_and_column_versions():
    shown = text(filtered())
    assert "reads  reward²" in shown
    assert "reads  reward³" in shown
    assert "in waves until enough groups are kept" in shown
    parallel = [line for line in text(ppo()).splitlines() if line[4:5] in ("┌", "├")]
    assert [line.split()[-4] for line in parallel] == [
        "reward.score",
        "reference.log_probs",
        "critic.values",
        "critic.update",
        "actor.update",
    ]


@pytest.mark.parametrize("width", [80, 110, 160])
def test_text_keeps_to_its_width(width):
    for make in FLOWS.values():
        assert max(map(len, text(make(), width).splitlines())) <= width
