"""The planner returns the serial chain, the stages that may overlap, and the columns that must be kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.flow import Flow, Kind, actor, critic, reference, reward, shape
from braidrl.flow.columns import ADMISSION
from braidrl.flow.flow import serial_chain
from tests.flow.flows import filtered, grpo, ppo


def ppo_early_log_probs() -> Flow:
    """Return the flow with the old log-probs listed beside the other inferences."""
    generate, *rest = (stage for stage in ppo(old="recompute").stages if stage.name != "actor.log_probs")
    return Flow("ppo", [generate, actor.log_probs(), *rest])


FLOWS = {"grpo": grpo, "filtered": filtered, "ppo": ppo, "ppo_early_log_probs": ppo_early_log_probs}


def names(stages):
    return [stage.name for stage in stages]


def test_chain_prefers_stages_of_the_active_model():
    reference_first = [actor.generate(), reference.log_probs(), actor.log_probs(), reward.verify(), *grpo().stages[2:]]
    assert names(serial_chain(Flow("f", reference_first)))[:4] == [
        "actor.generate",
        "actor.log_probs",
        "reward.verify",
        "centred_reward",
    ]
    assert names(serial_chain(ppo(old="recompute"))) == [
        "actor.generate",
        "actor.log_probs",
        "reward.score",
        "reference.log_probs",
        "spread_reward",
        "critic.values",
        "advantages_from_values",
        "critic.update",
        "actor.update",
    ]


def test_chain_keeps_the_sampling_segment_in_front():
    flow = filtered()
    generate, *rest = flow.stages
    with_reference = Flow("f", [generate, reference.log_probs(), critic.values(), *rest])
    chain = names(serial_chain(with_reference))
    segment = names(with_reference.sampling_segment)
    assert set(chain[: len(segment)]) == set(segment)


@given(st.sampled_from(sorted(FLOWS)), st.randoms(use_true_random=False))
def test_chain_and_order_do_not_depend_on_the_run(name, random):
    flow, again = FLOWS[name](), FLOWS[name]()
    assert flow.stages == again.stages
    assert serial_chain(flow) == serial_chain(again)
    # Nor does it depend on the order of the infer stages, as far as dependencies allow.
    infer = [i for i, stage in enumerate(flow.stages) if stage.kind is Kind.INFER]
    listed = list(flow.stages)
    shuffled = random.sample(infer, len(infer))
    for place, source in zip(infer, shuffled, strict=True):
        listed[place] = flow.stages[source]
    other = Flow(name, listed)
    assert other.depth == flow.depth
    assert {(e.source, e.target, e.columns, e.weights) for e in other.edges} == {
        (e.source, e.target, e.columns, e.weights) for e in flow.edges
    }


@pytest.mark.parametrize("name", FLOWS)
def test_chain_is_a_topological_order_of_all_stages(name):
    flow = FLOWS[name]()
    chain = names(serial_chain(flow))
    assert sorted(chain) == sorted(names(flow.stages))
    for edge in flow.edges:
        assert edge.source == ADMISSION or chain.index(edge.source) < chain.index(edge.target)


def test_reader_of_a_version_comes_before_the_next_is_written():
    flow = filtered()
    generate, verify, chosen, scaled, *rest = flow.stages
    reader = shape.spread_reward(coef=0.1)
    with_reader = Flow("f", [generate, reference.log_probs(), verify, chosen, reader, scaled, *rest])
    chain = names(serial_chain(with_reader))
    assert chain.index("spread_reward") < chain.index("scaled_reward")


def test_stages_of_equal_depth_are_independent():
    depth = ppo().depth
    assert [{name for name in depth if depth[name] == place} for place in range(1, 6)] == [
        {"actor.generate"},
        {"reward.score", "reference.log_probs", "critic.values"},
        {"spread_reward"},
        {"advantages_from_values"},
        {"critic.update", "actor.update"},
    ]
