"""Stages: names, parameters, state, and the errors of each."""

import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.algorithms.registry import shapes
from braidrl.flow import Role, Stage, When, actor, advantage, critic, data, kl, loss, reference, reward, shape
from braidrl.flow.signatures import ROLE_TYPES, compute_entry
from braidrl.flow.stages import make_stage
from tests.flow.flows import message_of, update

ERRORS = {
    "unknown type": (
        lambda: make_stage("generat", "actor"),
        "no stage type is called 'generat'. Did you mean 'generate'?",
    ),
    "unknown function": (
        lambda: advantage.centred_rewards(),
        "no advantage is called 'centred_rewards'. Did you mean 'centred_reward'?",
    ),
    "type without a role": (
        lambda: make_stage("generate"),
        "stage generate: the type 'generate' needs a role, as in `role: actor`",
    ),
    "role without a use": (
        lambda: make_stage("shape.scaled_reward", "actor"),
        "stage tests.flow.flows:scaled_reward: the type 'tests.flow.flows:scaled_reward' is no model's; remove "
        "`role: actor`",
    ),
    "unknown parameter": (
        lambda: make_stage("generate", "actor", {"gready": True}),
        "actor.generate has no parameter 'gready'. Did you mean 'greedy'?",
    ),
    "unknown setting": (
        lambda: shape.scaled_reward(factr=1.0),
        "tests.flow.flows:scaled_reward: scaled_reward has no setting 'factr'. Did you mean 'factor'?",
    ),
    "missing setting": (
        lambda: shape.spread_reward(),
        "tests.flow.flows:spread_reward: spread_reward needs the setting 'coef'",
    ),
    "no loss": (lambda: actor.update(), "actor.update needs a loss, as in `loss: {name: clip}`."),
    "loss without a name": (
        lambda: actor.update(loss={"low": 0.2}),
        "actor.update: loss has no name, as in `loss: {name: ...}`.",
    ),
    "unknown loss": (
        lambda: actor.update(loss=loss.plain_ration()),
        "actor.update: loss: no loss is called 'plain_ration'. Did you mean 'plain_ratio'?",
    ),
    "unknown setting of a loss": (
        lambda: actor.update(loss=loss.plain_ratio(lo=0.1)),
        "actor.update: loss: plain_ratio has no setting 'lo'. Did you mean 'low'?",
    ),
    "unknown aggregation": (
        lambda: actor.update(loss=loss.plain_ratio(), aggregate="mean-of-al"),
        "actor.update: aggregate: no aggregation is called 'mean-of-al'. Did you mean 'mean-of-all'?",
    ),
    "unknown KL estimator": (
        lambda: update(kl=kl.k99(coef=0.1)),
        "actor.update: kl: no KL estimator is called 'k99'.",
    ),
    "unknown old": (
        lambda: update(old="recompte"),
        "actor.update: no `old` is called 'recompte'. Did you mean 'recompute'?",
    ),
    "loss and source": (
        lambda: reference.update(loss=loss.plain_ratio(), source=actor),
        "reference.update takes a loss or a source, not both",
    ),
    "namespace that is no name": (
        lambda: actor.generate(into="a.b"),
        "actor.generate: into must be a plain name, as in `into: greedy`, got 'a.b'",
    ),
    "policies without an environment": (
        lambda: actor.generate(policies=["rival"]),
        "actor.generate: policies take turns in an environment",
    ),
    "policy of the stage's own name": (
        lambda: actor.generate(environment="a:B", policies=["actor"]),
        "actor.generate: policies are names of other roles, each once, got 'actor'",
    ),
    "namespace of a copy of weights": (
        lambda: reference.update(source=actor, of="rival"),
        "reference.update copies the weights of actor and reads no rows; remove `of`",
    ),
    "parameter that is no plain value": (
        lambda: actor.update(loss={"name": len}),
        "update: parameters are numbers, texts, lists and mappings, not <built-in function len>; "
        "name a function by module:function",
    ),
    "function that is not registered": (
        lambda: make_stage("tests.flow.flows:grpo"),
        "tests.flow.flows:grpo is no registered advantage or shape or select or data; put the family's decorator "
        "above the function",
    ),
    "function that does not exist": (
        lambda: make_stage("tests.flow.flows:centred_rewards"),
        "tests.flow.flows has no function 'centred_rewards'. Did you mean 'centred_reward'?",
    ),
    "module that does not exist": (lambda: make_stage("no_such_module:f"), "cannot import 'no_such_module'"),
    "file that does not exist": (lambda: make_stage("no_such_file.py:f"), "no file "),
    "when that never comes": (
        lambda: When(start=5, until=4),
        "when: every and from count from 1 and until is not before from, got every=1, from=5, until=4",
    ),
}


@pytest.mark.parametrize(("make", "message"), ERRORS.values(), ids=ERRORS)
def test_an_invalid_stage_is_refused_with_its_reason(make, message):
    assert message_of(make).startswith(message)


def test_parameters_belong_to_the_stage_alone():
    settings = {"name": "plain_ratio", "low": 0.1}
    stage = actor.update(loss=settings, aggregate="mean-of-all")
    settings["low"] = 0.9
    assert stage.params["loss"]["low"] == 0.1


def test_stage_survives_pickling():
    stage = update(when=When(every=2), after=["x"])
    assert pickle.loads(pickle.dumps(stage)) == stage


def test_families_list_what_is_registered():
    assert "centred_reward" in dir(advantage)
    assert "plain_ratio" in dir(loss)
    assert not hasattr(data, "__wrapped__")


def test_score_of_a_model_does_not_write_correct():
    assert "correct" in reward.verify().writes
    assert "correct" not in reward.score().writes


def test_role_of_any_name_writes_columns_of_its_own():
    assert Role("teacher").log_probs().writes == ("teacher_log_probs",)
    assert critic.values().writes == ("values",)


def penalty_sums(rollout_log_probs, *, target):
    return {"kl": rollout_log_probs.sum(), "rows": len(rollout_log_probs)}


def towards_target(state, totals, *, target):
    return {"coef": state["coef"] * (1.1 if totals["kl"] / totals["rows"] > target else 0.9)}


@shapes.register(writes=["token_rewards"], sums=penalty_sums, state={"coef": 0.2}, update_state=towards_target)
def adaptive_penalty(rollout_log_probs, *, state, target=1.0):
    return rollout_log_probs * state["coef"]


def test_state_starts_at_its_registered_value_or_its_parameter():
    assert shape.adaptive_penalty().state == {"coef": 0.2}
    stage = shape.adaptive_penalty(coef=0.5, target=2.0)
    assert stage.state == {"coef": 0.5}
    assert stage.settings == {"target": 2.0}
    assert update().state == {}


def test_state_changes_once_from_the_sums_of_all_parts():
    entry = compute_entry(shape.adaptive_penalty().type)
    parts = [penalty_sums(numbers, target=1.0) for numbers in (_Numbers([1, 2]), _Numbers([6]))]
    totals = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert entry.update_state({"coef": 0.2}, totals, target=1.0) == pytest.approx({"coef": 0.22})


class _Numbers(list):
    def sum(self):
        return sum(self)


def test_state_without_its_update_is_refused():
    with pytest.raises(ValueError, match=r"initial values, .*function .*sums"):
        shapes.register(writes=["x"], state={"coef": 1.0})


def test_name_both_in_state_and_settings_is_refused():
    def twice(reward, *, state, coef): ...

    with pytest.raises(ValueError, match=r"twice: \['coef'\] .*state .*settings"):
        shapes.register(writes=["x"], sums=penalty_sums, state={"coef": 1.0}, update_state=towards_target)(twice)


WHENS = st.builds(
    lambda every, start, length: When(every, start, None if length is None else start + length),
    st.integers(1, 6),
    st.integers(1, 12),
    st.none() | st.integers(0, 12),
)


@given(WHENS, WHENS)
def test_one_condition_covers_another_if_it_includes_all_its_iterations(one, other):
    # Starts are at most 12 and steps at most 6, so 120 iterations contain every phase that two of them can have.
    really = all(one.includes(k) for k in range(1, 121) if other.includes(k))
    assert one.covers(other) == really


def test_when_counts_from_its_start():
    assert [k for k in range(1, 12) if When(every=3, start=2, until=9).includes(k)] == [2, 5, 8]


def test_family_attributes_have_signature_and_docstring() -> None:
    clip, gae = inspect.signature(loss.clip), inspect.signature(advantage.gae)
    assert str(clip) == "(*, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> dict[str, typing.Any]"
    assert list(gae.parameters) == ["gamma", "lam", "of", "id", "when", "after"] and gae.return_annotation is Stage
    assert "arXiv 1707.06347" in str(loss.clip.__doc__) and "gamma: Discount" in str(advantage.gae.__doc__)
    assert inspect.signature(advantage.safe_rlhf).parameters["multiplier"].default == 1.0
    assert inspect.signature(kl.k3).parameters["coef"].default is inspect.Parameter.empty
    assert loss.clip(low=0.1) == {"name": "clip", "low": 0.1} and "clip" in dir(loss)


@pytest.mark.parametrize("type", ROLE_TYPES)
def test_both_forms_have_the_same_parameters_of_a_roles_stage(type: str) -> None:
    method = inspect.signature(getattr(Role, type)).parameters
    assert tuple(name for name in method if name not in ("self", "id", "when", "after")) == tuple(ROLE_TYPES[type])
