"""Small registered functions and flows shared by the tests of this folder."""

from collections.abc import Callable

import pytest

from braidrl.algorithms.registry import advantages, aggregations, losses, selections, shapes
from braidrl.errors import UserError
from braidrl.flow import Flow, Stage, actor, advantage, critic, loss, reference, reward, select, shape


@advantages.register(writes=["advantage"], scope="group")
def centred_reward(reward, group, *, floor=0.0): ...


@advantages.register(writes=["advantages", "returns"])
def advantages_from_values(values, token_rewards): ...


@shapes.register(writes=["token_rewards"])
def spread_reward(reward, ref_log_probs, old_log_probs=None, *, coef): ...


@shapes.register(writes=["reward"])
def scaled_reward(reward, *, factor=2.0): ...


@selections.register(scope="group")
def mixed_groups(correct, group): ...


@losses.register()
def plain_ratio(log_probs, old_log_probs, advantages, *, low=0.2, more=None): ...


@losses.register(columns={"old_values": "values"})
def squared_value(values, old_values, returns): ...


@aggregations.register("mean-of-all")
def mean_of_all(offsets): ...


def update(**params) -> Stage:
    return actor.update(loss=loss.plain_ratio(), aggregate="mean-of-all", **params)


def grpo() -> Flow:
    return Flow("grpo", [actor.generate(), reward.verify(), advantage.centred_reward(), update()])


def filtered() -> Flow:
    return Flow(
        "filtered",
        [
            actor.generate(),
            reward.verify(),
            select.mixed_groups(),
            shape.scaled_reward(),
            shape.scaled_reward(factor=3.0),
            advantage.centred_reward(),
            update(),
        ],
    )


def ppo(**params) -> Flow:
    return Flow(
        "ppo",
        [
            actor.generate(),
            reward.score(),
            reference.log_probs(),
            critic.values(),
            shape.spread_reward(coef=0.1),
            advantage.advantages_from_values(),
            critic.update(loss=loss.squared_value(), aggregate="mean-of-all"),
            update(**params),
        ],
    )


def message_of(make: Callable[[], object]) -> str:
    """Return the text of the expected UserError."""
    with pytest.raises(UserError) as caught:
        make()
    assert "\n" not in str(caught.value), "an error must be one line"
    return str(caught.value)
