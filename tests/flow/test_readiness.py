"""Each stage of a flow waits exactly for its inputs."""

from braidrl.flow import Flow, Kind, Scope, Stage, actor, critic, reference, reward
from braidrl.flow.columns import ADMISSION
from braidrl.flow.flow import waits_for, weights_wait_for


def compute(
    name: str, reads: tuple[str, ...], writes: tuple[str, ...], scope: Scope = Scope.ROW, kind: Kind = Kind.COMPUTE
) -> Stage:
    return Stage(name, name, None, kind=kind, reads=reads, writes=writes, scope=scope)


def train(role: str, reads: tuple[str, ...]) -> Stage:
    return Stage(f"{role}.update", "update", role, kind=Kind.TRAIN, reads=reads)


def ppo() -> Flow:
    return Flow(
        "ppo",
        [
            actor.generate(),
            reward.verify(),
            reference.log_probs(),
            critic.values(),
            actor.log_probs(),
            compute("whiten", ("values", "reward", "ref_log_probs"), ("advantages", "returns"), Scope.BATCH),
            train("critic", ("values", "returns")),
            train("actor", ("advantages", "old_log_probs")),
        ],
    )


def dapo() -> Flow:
    return Flow(
        "dapo",
        [
            actor.generate(),
            reward.verify(),
            compute("informative", ("correct",), (), Scope.GROUP, Kind.SELECT),
            compute("normalized", ("reward",), ("advantage",), Scope.GROUP),
            train("actor", ("advantage",)),
        ],
    )


def test_a_stage_waits_for_its_writers_and_for_every_select_before_it() -> None:
    assert waits_for(ppo())["whiten"] == (ADMISSION, "critic.values", "reward.verify", "reference.log_probs")
    assert waits_for(dapo())["normalized"] == (ADMISSION, "reward.verify", "informative")
    assert waits_for(dapo())["informative"] == (ADMISSION, "reward.verify")


def test_the_first_step_waits_for_inference_with_the_same_weights() -> None:
    waits = weights_wait_for(ppo())
    assert waits["actor.update"] == ("actor.log_probs",) and waits["critic.update"] == ("critic.values",)
    twice = Flow("twice", [actor.generate(), train("critic", ("tokens",)), train("critic", ("tokens",))])
    assert weights_wait_for(twice) == {"critic.update": (), "critic.update_2": ("critic.update",)}
