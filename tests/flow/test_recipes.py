"""The recipes: their stages, their parameters and the errors about them."""

import re

import pytest

from braidrl.flow import Flow, actor, advantage, loss, reward
from braidrl.flow.recipes import RECIPES, load_flow
from braidrl.flow.recipes.load import check_group_size, parameter_model
from braidrl.flow.yaml_form import from_yaml, to_yaml
from tests.flow.flows import message_of

RUN = {"max_response_tokens": 512, "samples_per_prompt": 8}


def names(flow: Flow) -> list[str]:
    return [stage.name for stage in flow.stages]


def test_sft_joins_given_responses_and_trains_on_them():
    flow = load_flow("sft", {}, RUN)
    assert names(flow) == ["data.join_response", "actor.update"]
    assert flow.needs_from_data() == ("response", "response_mask")


def test_grpo_has_a_reference_only_with_a_kl_term():
    assert names(load_flow("grpo")) == [
        "actor.generate",
        "reward.verify",
        "reference.log_probs",
        "advantage.group_normalized",
        "actor.update",
    ]
    without = load_flow("grpo", {"kl_coef": 0.0, "normalise": False})
    assert names(without) == ["actor.generate", "reward.verify", "advantage.group_centered", "actor.update"]
    assert without.roles == ("actor",)
    assert load_flow("grpo")["actor.update"].params["aggregate"] == "seq-mean-token-mean"


def test_dapo_matches_the_paper():
    flow = load_flow("dapo", {}, RUN)
    assert names(flow) == [
        "actor.generate",
        "reward.verify",
        "select.informative_groups",
        "shape.overlong_penalty",
        "advantage.group_normalized",
        "actor.update",
    ]
    update = flow["actor.update"].params
    assert (update["loss"]["low"], update["loss"]["high"], update["aggregate"]) == (0.2, 0.28, "token-mean")
    assert "kl" not in update
    assert flow["reward.verify"].params == {"correct_score": 1.0, "wrong_score": -1.0}
    assert flow["shape.overlong_penalty"].params == {"max_response_tokens": 512, "cache": 102}
    paper = load_flow("dapo", {"max_response_tokens": 20480}, RUN)
    assert paper["shape.overlong_penalty"].params == {"max_response_tokens": 20480, "cache": 4096}


def test_each_technique_of_dapo_can_be_left_out():
    plain = {"dynamic_sampling": False, "overlong_cache": 0}
    assert names(load_flow("dapo", plain, RUN)) == [
        "actor.generate",
        "reward.verify",
        "advantage.group_normalized",
        "actor.update",
    ]
    assert "shape.overlong_filter" in names(load_flow("dapo", {"overlong_filter": True}, RUN))


def test_ppo_has_eight_stages_and_three_models_that_infer_at_the_same_time():
    flow = load_flow("ppo")
    assert len(flow.stages) == 8
    assert {name for name, depth in flow.depth.items() if depth == 2} == {
        "reward.score",
        "reference.log_probs",
        "critic.values",
    }
    assert flow.trained_roles == ("critic", "actor")
    by_rules = load_flow("ppo", {"reward": "verify", "kl_coef": 0.0, "critic_warmup": 5})
    assert "reference" not in by_rules.roles
    assert not by_rules["actor.update"].when.includes(5)
    assert by_rules["actor.update"].when.includes(6)
    assert by_rules["critic.update"].when.includes(1)


def test_safe_rlhf_adds_five_stages_and_a_second_text_source_to_ppo():
    safe, plain = load_flow("safe_rlhf", {"ptx_coef": 0.5}), load_flow("ppo")
    added = set(names(safe)) - set(names(plain)) - {"shape.safe_rlhf_kl_penalty"}
    assert added == {
        "cost.score",
        "cost_critic.values",
        "advantage.cost_gae",
        "advantage.safe_rlhf",
        "cost_critic.update",
    }
    assert len(safe.stages) == len(plain.stages) + 5
    assert safe.needs_from_data() == ("ptx_tokens",)
    assert safe["advantage.safe_rlhf"].state == {"multiplier": 1.0}
    assert set(safe.scalar_roles) == {"reward", "cost", "critic", "cost_critic"}
    assert set(safe["cost_critic.update"].reads) >= {"cost_values", "cost_returns"}


def test_remax_is_ppo_without_the_critic_and_one_greedy_generate():
    remax, ppo = names(load_flow("remax", {"reward": "score"})), names(load_flow("ppo"))
    assert set(ppo) - set(remax) == {"critic.values", "critic.update", "shape.kl_penalty", "advantage.gae"}
    assert set(remax) - set(ppo) == {
        "actor.generate.greedy",
        "reward.score.greedy",
        "shape.advantage_kl_penalty",
        "advantage.remax",
    }
    assert load_flow("remax")["actor.generate.greedy"].params == {"into": "greedy", "greedy": True}


def test_recipes_without_a_critic_differ_only_in_parameters():
    updates = {
        name: load_flow(name, {}, RUN)["actor.update"].params for name in ("gspo", "cispo", "dr_grpo", "rloo", "maxrl")
    }
    assert updates["gspo"]["loss"] == {"name": "gspo", "low": 3e-4, "high": 4e-4}
    assert updates["gspo"]["aggregate"] == "seq-mean-token-mean"
    assert updates["cispo"]["loss"] == {"name": "cispo", "low": 1.0, "high": 4.0}
    assert updates["dr_grpo"]["aggregate"] == {"name": "token-sum-norm", "max_tokens": 512}
    assert updates["rloo"]["loss"] == {"name": "reinforce"}
    assert "advantage.maxrl" in names(load_flow("maxrl"))
    assert names(load_flow("reinforce_plus_plus", {"baseline": True, "kl_coef": 0.0}))[2:4] == [
        "advantage.group_centered",
        "advantage.reinforce_plus_plus_baseline",
    ]


def test_vapo_warms_its_critic_up_and_imitates_right_answers():
    flow = load_flow("vapo")
    assert not flow["actor.update"].when.includes(50) and flow["actor.update"].when.includes(51)
    assert flow["critic.update"].when.includes(1)
    assert flow["actor.update"].params["positive_coef"] == 0.1 and "correct" in flow["actor.update"].reads
    assert flow["advantage.decoupled_gae"].params == {"gamma": 1.0, "lam_critic": 1.0, "alpha": 0.05}


def test_pairs_are_what_reward_models_and_dpo_train_on():
    for name in ("reward_model", "dpo"):
        flow = load_flow(name)
        assert flow.trains_on_pairs and flow.needs_from_data() == ("response", "response_mask")
    assert not load_flow("sft").trains_on_pairs
    assert load_flow("reward_model", {"role": "cost"}).trained_roles == ("cost",)


def test_any_recipe_takes_several_rewards_each_with_its_weight():
    for name in ("grpo", "dapo", "ppo", "rloo", "safe_rlhf"):
        flow = load_flow(name, {"reward": {"verify": 1.0, "score": 0.5, "style": -1.0}}, RUN)
        assert flow["reward.score"].params == {"weight": 0.5} and flow["style.score"].params == {"weight": -1.0}
        assert "style_score" in flow["style.score"].writes
        assert [c.writer for c in flow.inputs["style.score"] if c.name == "reward"] == ["reward.score"]
        assert from_yaml(to_yaml(flow)) == flow


def test_a_users_function_may_write_the_cost(tmp_path):
    path = tmp_path / "limits.py"
    path.write_text(
        "from braidrl.algorithms.registry import shapes\n\n"
        "@shapes.register(writes=['cost'])\ndef too_long(action_tokens):\n    return action_tokens.float()\n"
    )
    flow = load_flow("safe_rlhf", {"cost": f"{path}:too_long"})
    assert "too_long" in names(flow) and "cost" not in flow.roles


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("old", [None, "recompute", "rollout", "self"])
def test_recipe_round_trips_through_yaml(name, old):
    model = parameter_model(name, RECIPES.find(name))
    flow = load_flow(name, {"old": old} if model and old and "old" in model.model_fields else {}, RUN)
    assert flow.name == name
    assert from_yaml(to_yaml(flow)) == flow


def test_recipe_takes_a_correction_and_an_aggregation_with_settings():
    params = {
        "correction": {"name": "truncated", "cap": 3.0},
        "aggregate": {"name": "token-sum-norm", "max_tokens": 64},
    }
    update = load_flow("grpo", params)["actor.update"]
    assert "rollout_log_probs" in update.reads
    assert update.params["aggregate"] == {"name": "token-sum-norm", "max_tokens": 64}


def test_yaml_flow_is_loaded_by_its_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(to_yaml(load_flow("grpo")))
    assert load_flow(str(path)) == load_flow("grpo")
    message = message_of(lambda: load_flow(str(path), {"kl_coef": 0.0}))
    assert re.match(rf"{path} .*no algorithm.kl_coef; remove it, or write kl_coef", message)


ERRORS = {
    "loss with an aggregation it is not defined for": (
        ("gspo", {"aggregate": "token-mean"}),
        r"actor.update: gspo .*seq-mean-token-mean, not token-mean",
    ),
    "advantage that counts successes without a verifier": (
        ("maxrl", {"reward": "score"}),
        r"stage advantage.maxrl .*'correct', .*no earlier",
    ),
    "no source of rewards": (("rloo", {"reward": {}}), r"reward .*no source; .*`reward: verify`"),
    "source that is no name": (
        ("rloo", {"reward": "my model"}),
        r"reward: 'my model' .*; write verify, score",
    ),
    "multiplier below 0": (
        ("safe_rlhf", {"multiplier": -1.0}),
        r"recipe safe_rlhf: multiplier: .* 0, got -1.0",
    ),
    "weight of nothing": (("dpo", {"beta": 0.0}), r"recipe dpo: beta: .* 0, got 0.0"),
    "cost that is no function": (("safe_rlhf", {"cost": "cheap"}), r"no stage type .*'cheap'"),
    "target that cannot be": (
        ("ppo", {"kl_target": 0.0}),
        r"recipe ppo: kl_target: .* 0, got 0.0",
    ),
    "unknown recipe": (("grop", {}), r"no recipe .*'grop'.* 'grpo'"),
    "unknown parameter": (
        ("grpo", {"clip_hi": 0.2}),
        r"recipe grpo: .*'clip_hi'.* 'clip_high'",
    ),
    "out of range": (
        ("grpo", {"clip_low": -1.0}),
        r"recipe grpo: clip_low: .* 0, got -1.0",
    ),
    "parameter of another recipe": (
        ("sft", {"kl_coef": 0.1}),
        r"recipe sft: .*'kl_coef', .*grpo, .*remove algorithm.kl_coef",
    ),
    "missing": (("dapo", {}), r"recipe dapo: .*'max_response_tokens' is not set"),
    "parameters that do not fit": (
        ("dapo", {"max_response_tokens": 10, "overlong_cache": 11}),
        r"recipe dapo: overlong_cache \(11\) .*max_response_tokens \(10\)",
    ),
    "unknown estimator": (("grpo", {"kl_estimator": "k9"}), r"actor.update: kl: .*'k9'"),
    "loss without its aggregation": (
        ("ppo", {"aggregate": {"name": "token-sum-norm"}}),
        r"actor.update: aggregate: token-sum-norm .*'max_tokens'",
    ),
    "unknown aggregation": (
        ("grpo", {"aggregate": "token-men"}),
        r"actor.update: aggregate: .*'token-men'.* 'token-mean'",
    ),
}


@pytest.mark.parametrize(("given", "message"), ERRORS.values(), ids=ERRORS)
def test_an_invalid_recipe_is_refused_with_its_reason(given, message):
    assert re.match(message, message_of(lambda: load_flow(*given)))


def test_groups_smaller_than_an_estimator_needs_are_refused():
    message = message_of(lambda: load_flow("grpo", {}, {"samples_per_prompt": 1}))
    assert re.match(r"stage advantage.group_normalized: .* 2.*; raise rollout.samples_per_prompt", message)
    subsets = Flow("f", [actor.generate(), reward.verify(), advantage.pass_at_k(k=8)])
    check_group_size(subsets, 9)
    assert "pass_at_k needs at least 9 samples" in message_of(lambda: check_group_size(subsets, 8))


def test_loss_with_an_aggregation_that_it_is_not_defined_for_is_refused():
    message = message_of(lambda: actor.update(loss=loss.gmpo(), aggregate="token-mean"))
    assert message.startswith("actor.update: gmpo is defined for aggregate ")
    assert message.endswith(", not token-mean")


def test_a_parameter_replaces_the_loss_of_a_recipe():
    flow = load_flow("grpo", {"loss": {"name": "cispo", "high": 0.3}, "kl_coef": 0}, {"samples_per_prompt": 4})
    assert flow.stages[-1].params["loss"] == {"name": "cispo", "high": 0.3}
    assert load_flow("dapo", {"loss": "sapo"}, {"max_response_tokens": 8}).stages[-1].params["loss"] == {"name": "sapo"}


def test_graded_rewards_use_dynamic_sampling_by_reward_differences():
    graded = load_flow("dapo", {"dynamic_sampling": "rewards"}, {"max_response_tokens": 8})
    assert "select.informative_rewards" in [stage.type for stage in graded.stages]
    assert "select.informative_groups" not in [stage.type for stage in graded.stages]
