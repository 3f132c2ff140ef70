"""The YAML form and the Python form are equal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.errors import UserError
from braidrl.flow import Flow, When, actor, reward
from braidrl.flow.yaml_form import from_yaml, to_yaml
from tests.flow.flows import filtered, grpo, message_of, ppo, update

STAGES = """
flow: grpo
stages:
- {role: actor, type: generate}
- {role: reward, type: verify}
- {type: advantage.centred_reward}
- role: actor
  type: update
  params: {loss: {name: plain_ratio}, aggregate: mean-of-all}
"""


def test_yaml_loads_to_the_flow_that_python_makes():
    assert from_yaml(STAGES) == grpo()


@pytest.mark.parametrize("make", [grpo, filtered, ppo, lambda: ppo(old="recompute", entropy_coef=1e-6)])
def test_flow_round_trips_through_yaml(make):
    flow = make()
    back = from_yaml(to_yaml(flow))
    assert back == flow
    assert back.edges == flow.edges


def test_names_order_and_when_round_trip_through_yaml():
    flow = Flow(
        "f",
        [
            actor.generate(),
            actor.generate(into="greedy", greedy=True, id="baseline", when=When(every=2, start=3, until=9)),
            reward.verify(after=["baseline"], correct_score=1.0),
            *grpo().stages[2:],
        ],
    )
    text = to_yaml(flow)
    assert from_yaml(text) == flow
    assert "when: {every: 2, from: 3, until: 9}" in text
    assert "id: actor.generate" not in text, "a default name is left out"


def test_file_is_read_by_its_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(STAGES)
    assert from_yaml(path) == from_yaml(str(path)) == grpo()


@given(st.floats(allow_nan=False, allow_infinity=False), st.text(), st.integers())
def test_every_plain_parameter_round_trips_through_yaml(number, text, whole):
    stage = actor.update(
        loss={"name": "plain_ratio", "low": number}, aggregate="mean-of-all", correction=None, entropy_coef=whole
    )
    flow = Flow("f", [*grpo().stages[:3], stage])
    assert from_yaml(to_yaml(flow)) == flow
    nested = actor.update(loss={"name": "plain_ratio", "more": {text or "x": [number, text]}}, aggregate="mean-of-all")
    assert from_yaml(to_yaml(Flow("f", [*grpo().stages[:3], nested]))).stages[-1].params == nested.params


def test_number_in_short_scientific_form_is_a_number():
    text = STAGES.replace("{name: plain_ratio}", "{name: plain_ratio, low: 1e-6}")
    assert from_yaml(text)["actor.update"].params["loss"]["low"] == 1e-6


def changed(old, new):
    assert old in STAGES
    return STAGES.replace(old, new)


ERRORS = {
    "unknown key": (
        changed("- {role: reward, type", "- {rol: reward, type"),
        "stage 2 (verify): unknown key 'rol'. Did you mean 'role'?",
    ),
    "unknown key of the flow": (changed("stages:", "stage:"), "unknown key 'stage'. Did you mean 'stages'?"),
    "missing type": (
        changed("type: verify", "id: check"),
        "stage 2 (check): the stage has no type, as in `type: generate`",
    ),
    "missing name": (changed("flow: grpo", ""), "the flow has no name, as in `flow: grpo`"),
    "missing stages": (
        "flow: f",
        "the flow has no list of stages, as in `stages: [{role: actor, type: generate}]`",
    ),
    "stage that is no mapping": (
        "flow: f\nstages: [generate]",
        "stage 1: expected keys and values (id, role, type, params, after, when), got 'generate'",
    ),
    "unknown type": (
        changed("type: verify", "type: verfy"),
        "stage 2 (verfy): no stage type is called 'verfy'. Did you mean 'verify'?",
    ),
    "unknown parameter": (
        changed("type: verify", "type: verify, params: {corect_score: 1}"),
        "stage 2 (verify): reward.verify has no parameter 'corect_score'. Did you mean 'correct_score'?",
    ),
    "parameters that are no mapping": (
        changed("type: verify", "type: verify, params: [1]"),
        "stage 2 (verify): params must be a mapping, got [1]",
    ),
    "unknown key of when": (
        changed("type: verify", "type: verify, when: {start: 2}"),
        "stage 2 (verify): when: unknown key 'start'. Known: every, from, until.",
    ),
    "when that is no number": (
        changed("type: verify", "type: verify, when: {every: often}"),
        "stage 2 (verify): when: every must be a whole number, got 'often'",
    ),
    "when that never comes": (
        changed("type: verify", "type: verify, when: {from: 3, until: 2}"),
        "stage 2 (verify): when: every and from count from 1 and until is not before from, got every=1, from=3, "
        "until=2",
    ),
    "after that is no list": (
        changed("type: verify", "type: verify, after: {a: 1}"),
        "stage 2 (verify): after must be a list of stages, as in `after: [reward.verify]`, got {'a': 1}",
    ),
    "parameter of another type": (
        changed("type: verify", "type: verify, params: {correct_score: high}"),
        "stage 2 (verify): reward.verify: correct_score must be a number, got 'high'",
    ),
    "parameter out of its range": (
        changed("type: generate", "type: generate, params: {top_p: 1.5}"),
        "stage 1 (generate): actor.generate: top_p must lie between 1e-09 and 1, got 1.5",
    ),
    "loss that is no name": (
        changed("{loss: {name: plain_ratio}", "{loss: [plain_ratio]"),
        "stage 4 (update): actor.update: loss has no name, as in `loss: {name: ...}`.",
    ),
    "setting of another type": (
        changed("{loss: {name: plain_ratio}", "{loss: {name: clip, low: often}"),
        "stage 4 (update): actor.update: loss: clip: low must be a number, got 'often'",
    ),
    "KL term of another type": (
        changed("{loss: {name: plain_ratio}", "{kl: {name: k3, coef: small}, loss: {name: plain_ratio}"),
        "stage 4 (update): actor.update: kl: needs `coef`, the factor before the KL term",
    ),
    "number that is not finite": (
        changed("{loss: {name: plain_ratio}", "{kl: {name: k3, coef: .nan}, loss: {name: plain_ratio}"),
        "stage 4 (update): params.kl.coef must be a finite number, got nan",
    ),
    "unknown after": (
        changed("type: verify", "type: verify, after: [actor]"),
        "stage reward.verify: after: no stage is called 'actor'.",
    ),
    "column without a writer": (
        changed("- {role: reward, type: verify}\n", ""),
        "stage centred_reward reads 'reward', which no earlier stage writes.",
    ),
    "no YAML": ("flow: [", "YAML: did not find"),
}


@pytest.mark.parametrize(("text", "message"), ERRORS.values(), ids=ERRORS)
def test_yaml_that_is_not_a_flow_is_refused_with_its_reason(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert (
        message_of(lambda: from_yaml(path)).removeprefix(str(path)).startswith((f": {message}", f" is not {message}"))
    )


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no flow file .*absent\.yaml"):
        from_yaml(tmp_path / "absent.yaml")


def test_a_loss_may_be_its_name_alone():
    assert from_yaml(changed("{loss: {name: plain_ratio}", "{loss: plain_ratio")) == grpo()


def test_after_may_be_one_name():
    text = changed("type: verify", "type: verify, after: actor.generate")
    assert from_yaml(text)["reward.verify"].after == ("actor.generate",)


def test_update_without_a_name_is_numbered_as_in_python():
    text = STAGES + "- {role: actor, type: update, params: {loss: {name: plain_ratio}, aggregate: mean-of-all}}\n"
    assert from_yaml(text) == Flow("grpo", [*grpo().stages, update()])
