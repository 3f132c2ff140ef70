"""The recipes: their stages, their parameters and the errors about them."""

import pytest

from braidrl.flow import Flow, actor, loss
from braidrl.flow.recipes import RECIPES, load_flow
from braidrl.flow.recipes.load import parameter_model
from braidrl.flow.yaml_form import from_yaml, to_yaml
from tests.flow.flows import message_of

RUN = {"max_response_tokens": 512, "samples_per_prompt": 8}


def names(flow: Flow) -> list[str]:
    return [stage.name for stage in flow.stages]


def test_sft_joins_given_responses_and_trains_on_them():
    flow = load_flow("sft", {}, RUN)
    assert names(flow) == ["data.join_response", "actor.update"]
    assert flow.needs_from_data() == ("response",)


def test_grpo_has_a_reference_only_with_a_kl_term():
    assert names(load_flow("grpo")) == [
        "actor.generate", "reward.verify", "reference.log_probs", "advantage.group_normalized", "actor.update",
    ]  # fmt: skip
    without = load_flow("grpo", {"kl_coef": 0.0, "normalise": False})
    assert names(without) == ["actor.generate", "reward.verify", "advantage.group_centered", "actor.update"]
    assert without.roles == ("actor",)
    assert load_flow("grpo")["actor.update"].params["aggregate"] == "seq-mean-token-mean"


def test_dapo_is_the_papers():
    flow = load_flow("dapo", {}, RUN)
    assert names(flow) == [
        "actor.generate", "reward.verify", "select.informative_groups", "shape.overlong_penalty",
        "advantage.group_normalized", "actor.update",
    ]  # fmt: skip
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
        "actor.generate", "reward.verify", "advantage.group_normalized", "actor.update",
    ]  # fmt: skip
    assert "shape.overlong_filter" in names(load_flow("dapo", {"overlong_filter": True}, RUN))


def test_ppo_has_eight_stages_and_three_models_that_infer_at_the_same_time():
    flow = load_flow("ppo")
    assert len(flow.stages) == 8
    assert {name for name, depth in flow.depth.items() if depth == 2} == {
        "reward.score", "reference.log_probs", "critic.values",
    }  # fmt: skip
    assert flow.trained_roles == ("critic", "actor")
    by_rules = load_flow("ppo", {"reward": "verify", "kl_coef": 0.0, "critic_warmup": 5})
    assert "reference" not in by_rules.roles
    assert not by_rules["actor.update"].when.includes(5)
    assert by_rules["actor.update"].when.includes(6)
    assert by_rules["critic.update"].when.includes(1)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("old", [None, "recompute", "rollout", "self"])
def test_recipe_comes_back_from_its_yaml(name, old):
    model = parameter_model(name, RECIPES[name])
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
    assert message == f"{path} is a YAML flow and takes no parameter 'kl_coef'; set it in the file"


ERRORS = {
    "unknown recipe": (("grop", {}), "no recipe is called 'grop'. Did you mean 'grpo'?"),
    "unknown parameter": (("grpo", {"clip_hi": 0.2}), "recipe grpo: no parameter is called 'clip_hi'. Did you mean 'clip_high'?"),
    "out of range": (
        ("grpo", {"clip_low": -1.0}),
        "recipe grpo: clip_low: Input should be greater than or equal to 0, got -1.0",
    ),
    "parameter of another recipe": (("sft", {"kl_coef": 0.1}), "recipe sft: no parameter is called 'kl_coef'."),
    "missing": (("dapo", {}), "recipe dapo: the parameter 'max_response_tokens' is not set"),
    "parameters that do not fit": (
        ("dapo", {"max_response_tokens": 10, "overlong_cache": 11}),
        "recipe dapo: overlong_cache (11) is above max_response_tokens (10)",
    ),
    "unknown estimator": (("grpo", {"kl_estimator": "k9"}), "actor.update: kl: no KL estimator is called 'k9'."),
    "loss without its aggregation": (
        ("ppo", {"aggregate": {"name": "token-sum-norm"}}),
        "actor.update: aggregate: token-sum-norm needs the setting 'max_tokens'",
    ),
    "unknown aggregation": (
        ("grpo", {"aggregate": "token-men"}),
        "actor.update: aggregate: no aggregation is called 'token-men'. Did you mean 'token-mean'?",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "message"), ERRORS.values(), ids=ERRORS)
def test_recipe_that_cannot_be_is_refused_with(given, message):
    assert message_of(lambda: load_flow(*given)).startswith(message)


@pytest.mark.parametrize("name", RECIPES)
def test_every_parameter_is_explained(name):
    model = parameter_model(name, RECIPES[name])
    assert model is not None
    assert all(field.description for field in model.model_fields.values())


def test_groups_smaller_than_an_estimator_needs_are_refused():
    message = message_of(lambda: load_flow("grpo", {}, {"samples_per_prompt": 1}))
    assert message == (
        "stage advantage.group_normalized: group_normalized needs at least 2 samples per prompt, there are 1; "
        "raise rollout.samples_per_prompt"
    )


def test_loss_with_an_aggregation_that_it_is_not_defined_for_is_refused():
    message = message_of(lambda: actor.update(loss=loss.gmpo(), aggregate="token-mean"))
    assert message.startswith("actor.update: gmpo is defined for aggregate ")
    assert message.endswith(", not token-mean")
