"""A flow derives its graph from its stages, and refuses inconsistent stages."""

import re

import pytest

from braidrl.algorithms.registry import advantages
from braidrl.errors import UserError
from braidrl.flow import (
    Flow,
    Kind,
    Role,
    When,
    actor,
    advantage,
    cost_critic,
    critic,
    loss,
    reference,
    reward,
    select,
    shape,
)
from braidrl.flow.flow import Edge
from braidrl.flow.stages import make_stage
from tests.flow.flows import filtered, grpo, message_of, ppo, update


def edges_into(flow, target):
    return {edge for edge in flow.edges if edge.target == target}


def columns_between(flow, source, target):
    return {name for e in flow.edges if (e.source, e.target) == (source, target) for name in e.columns}


def test_a_stage_with_two_inputs_has_two_edges():
    flow = ppo()
    assert columns_between(flow, "reward.score", "spread_reward") == {"reward"}
    assert columns_between(flow, "reference.log_probs", "spread_reward") == {"ref_log_probs"}
    assert flow.depth["reward.score"] == flow.depth["reference.log_probs"] == flow.depth["critic.values"] == 2
    assert flow.depth["spread_reward"] == 3


def test_weights_give_an_edge_from_every_use_to_the_update_after_it():
    flow = ppo(old="recompute")
    weights = {(e.source, e.target, e.weights) for e in flow.edges if e.weights}
    assert weights == {
        ("actor.generate", "actor.update", "actor"),
        ("actor.log_probs", "actor.update", "actor"),
        ("critic.values", "critic.update", "critic"),
    }


def test_copying_weights_waits_for_the_update_of_their_source():
    flow = Flow("ema", [*ppo().stages, reference.update(source=actor, decay=0.9)])
    assert Edge("actor.update", "reference.update", weights="actor") in flow.edges
    assert Edge("reference.log_probs", "reference.update", weights="reference") in flow.edges
    assert flow.trained_roles == ("critic", "actor")
    assert flow.depth["reference.update"] == flow.depth["actor.update"] + 1


def test_reader_gets_the_latest_version_before_it():
    flow = filtered()
    readers = {name: {c.writer for c in inputs if c.name == "reward"} for name, inputs in flow.inputs.items()}
    assert readers["scaled_reward"] == {"reward.verify"}
    assert readers["scaled_reward_2"] == {"scaled_reward"}
    assert readers["centred_reward"] == {"scaled_reward_2"}


def test_stages_behind_a_select_wait_for_the_rows_that_it_keeps():
    flow = filtered()
    assert Edge("mixed_groups", "scaled_reward") in flow.edges
    assert flow.depth["mixed_groups"] < flow.depth["scaled_reward"]
    assert [stage.name for stage in flow.sampling_segment] == ["actor.generate", "reward.verify", "mixed_groups"]
    assert flow["mixed_groups"].kind is Kind.SELECT


def test_optional_column_is_read_only_where_it_is_written():
    generate, *rest = ppo().stages
    without, with_it = ppo(), Flow("f", [generate, actor.log_probs(), *rest])
    assert "old_log_probs" not in {c.name for c in without.inputs["spread_reward"]}
    assert columns_between(with_it, "actor.log_probs", "spread_reward") == {"old_log_probs"}


def test_update_reads_advantages_per_token_or_per_row():
    assert "advantage" in {c.name for c in grpo().inputs["actor.update"]}
    assert "advantages" in {c.name for c in ppo().inputs["actor.update"]}


def test_old_recompute_inserts_a_log_probs_stage():
    names = [stage.name for stage in ppo(old="recompute").stages]
    assert names[names.index("actor.log_probs") + 1] == "critic.update", "only before the first train stage"
    assert "actor.log_probs" not in [stage.name for stage in ppo().stages]
    behind_select = Flow("f", [*filtered().stages[:-1], update(old="recompute")])
    assert [stage.name for stage in behind_select.stages][-2:] == ["actor.log_probs", "actor.update"]


def test_old_recompute_inserts_a_stage_for_each_actor():
    student = Role("student")
    updates = [role.update(loss=loss.clip(), old="recompute") for role in (actor, student)]
    flow = Flow("two", [actor.generate(), reward.verify(), advantage.group_centered(), *updates])
    assert [stage.name for stage in flow.stages[3:]] == [
        "actor.log_probs",
        "student.log_probs",
        "actor.update",
        "student.update",
    ]
    assert columns_between(flow, "student.log_probs", "student.update") == {"student_log_probs"}


def test_old_log_probs_of_the_engine_need_no_stage():
    assert "rollout_log_probs" in {c.name for c in ppo(old="rollout").inputs["actor.update"]}


def test_second_generation_writes_into_its_namespace():
    flow = Flow(
        "two",
        [
            actor.generate(),
            actor.generate(into="greedy"),
            reward.verify(),
            reward.verify(of="greedy"),
            *grpo().stages[2:],
        ],
    )
    assert [stage.name for stage in flow.stages][:4] == [
        "actor.generate",
        "actor.generate.greedy",
        "reward.verify",
        "reward.verify.greedy",
    ]
    assert columns_between(flow, "actor.generate.greedy", "reward.verify.greedy") == {
        "greedy.tokens",
        "greedy.action_mask",
    }
    assert "greedy.reward" in flow["reward.verify.greedy"].writes


def test_further_policies_write_into_namespaces_that_later_stages_read():
    stages = [
        actor.generate(environment="a:B", policies=["rival"]),
        advantage.group_centered(),
        advantage.group_centered(of="rival"),
        actor.update(loss=loss.clip(), old="recompute"),
        Role("rival").update(of="rival", loss=loss.clip(), old="recompute"),
    ]
    flow = Flow("two", stages)
    assert flow.trained_roles == flow.roles == ("actor", "rival")
    assert flow["advantage.group_centered.rival"].writes == ("rival.advantage",)
    assert columns_between(flow, "actor.generate", "advantage.group_centered.rival") == {
        "rival.reward",
        "rival.statistics_mask",
    }
    assert columns_between(flow, "rival.log_probs", "rival.update") == {"rival.rival_log_probs"}
    assert {"rival.tokens", "rival.length"} <= columns_between(flow, "actor.generate", "rival.update")
    assert ("actor.generate", "rival.update") in [(e.source, e.target) for e in flow.edges if e.weights == "rival"]
    assert flow == Flow("two", [*stages[:-1], Role("rival").update(loss=loss.clip(), old="recompute")]), "its own rows"


def test_columns_of_the_cost_have_names_of_their_own():
    update_of_cost = cost_critic.update(loss=loss.squared_value(), aggregate="mean-of-all")
    assert {"cost_values", "cost_returns"} <= set(update_of_cost.reads)
    assert "values" not in update_of_cost.reads


def test_after_moves_only_the_stage_that_names_it():
    generate, verify, centred, train = grpo().stages
    values = critic.values(after=["centred_reward"])
    flow = Flow("f", [generate, verify, values, centred, train])
    assert [stage.name for stage in flow.stages] == [
        "actor.generate",
        "reward.verify",
        "centred_reward",
        "critic.values",
        "actor.update",
    ]
    assert Edge("centred_reward", "critic.values") in flow.edges


def test_flow_lists_the_columns_needed_from_data():
    @advantages.register("reads_response", writes=["advantage"])
    def reads_response(response): ...

    flow = Flow("f", [actor.generate(), advantage.reads_response(), update()])
    assert flow.needs_from_data() == ("response",)
    assert grpo().needs_from_data() == ()


def test_equal_flows_have_equal_hashes():
    assert filtered() == filtered()
    assert hash(filtered()) == hash(filtered())
    assert filtered() != grpo()
    assert ppo() != ppo(old="rollout")


ERRORS = {
    "unknown column": (
        lambda: Flow("f", [actor.generate(), make_stage("tests.flow.flows:centred_reward"), update()]),
        r"stage centred_reward .*'reward', .*no earlier",
    ),
    "column written later": (
        lambda: Flow("f", [actor.generate(), advantage.centred_reward(), reward.verify(), update()]),
        r"stage centred_reward reads 'reward', .*move reward.verify before",
    ),
    "first version missing": (
        lambda: Flow("f", [actor.generate(), shape.scaled_reward(), update()]),
        r"stage scaled_reward .*'reward', .*no earlier",
    ),
    "none of several columns": (
        lambda: Flow("f", [actor.generate(), update()]),
        r"stage actor.update .*'turn_advantages' or 'advantage', .*no earlier",
    ),
    "state before the last generate": (
        lambda: Flow(
            "f",
            [
                actor.generate(),
                reference.log_probs(),
                reward.verify(),
                shape.adaptive_kl_penalty(target=1.0),
                actor.generate(into="greedy"),
            ],
        ),
        r"shape.adaptive_kl_penalty .*state.*move actor.generate.greedy before shape.adaptive_kl_penalty",
    ),
    "two writers": (
        lambda: Flow("f", [actor.generate(), reward.verify(), reward.verify(id="again"), update()]),
        r"column 'correct' .*reward.verify and by again.*`into`",
    ),
    "cycle": (
        lambda: Flow("f", [actor.generate(after=["reward.verify"]), reward.verify(after=["actor.generate"])]),
        r"`after` .*cycle .*actor.generate, reward.verify; remove",
    ),
    "unknown after": (
        lambda: Flow("f", [actor.generate(), reward.verify(after=["actor.generat"])]),
        r"stage reward.verify: after: .*'actor.generat'.* 'actor.generate'",
    ),
    "train before select": (
        lambda: Flow("f", [*grpo().stages, select.mixed_groups()]),
        r"mixed_groups .*; move mixed_groups before actor.update",
    ),
    "same id twice": (
        lambda: Flow("f", [actor.generate(id="x"), reward.verify(id="x")]),
        r"2 stages .*'x'; .* `id`",
    ),
    "column that is not written in every iteration": (
        lambda: Flow("f", [actor.generate(), reward.verify(when=When(every=2)), advantage.centred_reward(), update()]),
        r"stage centred_reward .*'reward', .*reward.verify.* `when`",
    ),
    "unknown stage": (
        lambda: grpo()["actor.updat"],
        r"flow grpo .*'actor.updat'.* 'actor.update'",
    ),
}


@pytest.mark.parametrize(("make", "message"), ERRORS.values(), ids=ERRORS)
def test_an_inconsistent_flow_is_refused_with_its_reason(make, message):
    assert re.match(message, message_of(make))


def test_misspelt_column_is_answered_with_the_nearest():
    @advantages.register("misspelt", writes=["advantage"])
    def misspelt(rewards): ...

    message = message_of(lambda: Flow("f", [actor.generate(), reward.verify(), advantage.misspelt(), update()]))
    assert re.search(r"reads 'rewards', .*no earlier .* 'reward'\?$", message)


def test_later_version_may_skip_iterations():
    generate, verify, centred, train = grpo().stages
    flow = Flow("f", [generate, verify, shape.scaled_reward(when=When(start=10)), centred, train])
    assert flow.inputs["centred_reward"][0].writer == "scaled_reward"


def test_a_second_select_after_training_is_refused():
    with pytest.raises(UserError, match="comes after"):
        Flow("f", [*filtered().stages, select.mixed_groups(id="more")])
