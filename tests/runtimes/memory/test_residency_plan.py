"""Every stage finds its assets in memory, the budget holds, and moves repeat from iteration to iteration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.errors import UserError
from braidrl.flow import Flow, Kind, Stage, actor, critic, data, reference, reward
from braidrl.runtimes.memory.residency import (
    PUBLISH,
    Asset,
    needed_assets,
    residency_plan,
    sizes_during,
)


def train(role: str) -> Stage:
    return Stage(f"{role}.update", "update", role, kind=Kind.TRAIN, reads=("tokens",))


def ppo() -> Flow:
    return Flow(
        "ppo",
        [
            actor.generate(),
            reward.score(),
            reference.log_probs(),
            critic.values(),
            actor.log_probs(),
            train("critic"),
            train("actor"),
        ],
    )


ASSETS = [
    Asset("actor", "engine"),
    Asset("actor", "optimizer"),
    Asset("actor", "weights"),
    Asset("critic", "optimizer"),
    Asset("critic", "weights"),
    Asset("reference", "weights"),
    Asset("reward", "weights"),
]


@given(st.lists(st.integers(1, 20), min_size=len(ASSETS), max_size=len(ASSETS)), st.integers(0, 60), st.booleans())
def test_stages_have_assets_within_any_sufficient_budget(bytes_of: list[int], spare: int, share: bool) -> None:
    flow, sizes = ppo(), dict(zip(ASSETS, bytes_of, strict=True))
    shared = frozenset({"actor"} if share else ())
    needs = {step: needed & set(sizes) for step, needed in needed_assets(flow, shared).items()}
    largest = max(sum(sizes[a] for a in needed) for needed in needs.values())
    plan = residency_plan(flow, sizes, largest + spare, shared)
    resident = plan.kept | needs[PUBLISH]
    for step, needed in needs.items():
        assert plan.moved[step] == sum(sizes[asset] for asset in resident ^ (plan.kept | needed))
        resident = plan.kept | needed
        assert sum(sizes[asset] for asset in resident) <= plan.most <= largest + spare
    with pytest.raises(UserError, match=f"and {largest - 1:,} are there"):
        residency_plan(flow, sizes, largest - 1, shared)


def test_with_room_for_all_or_no_budget_nothing_moves() -> None:
    sizes = dict.fromkeys(ASSETS, 5)
    for budget in (None, 5 * len(ASSETS)):
        plan = residency_plan(ppo(), sizes, budget)
        assert plan.kept == set(ASSETS) and not any(plan.moved.values()) and plan.most == sum(sizes.values())


def test_a_tight_process_lets_its_engine_sleep_while_it_trains() -> None:
    flow = Flow("grpo", [actor.generate(), train("actor")])
    sizes = {Asset("actor", "engine"): 6, Asset("actor", "weights"): 2, Asset("actor", "optimizer"): 6}
    plan = residency_plan(flow, sizes, 8)
    assert plan.kept == {Asset("actor", "weights")} and plan.most == 8
    # The optimizer replaces the engine for the update, which takes new weights after it.
    assert plan.moved == {"actor.generate": 0, "actor.update": 12, PUBLISH: 12}


def test_a_reference_that_copies_the_actor_needs_both() -> None:
    flow = Flow("ema", [actor.generate(), train("actor"), reference.update(source="actor", decay=0.9)])
    assert needed_assets(flow, frozenset({"actor"}))["reference.update"] == {
        Asset("actor", "weights"),
        Asset("reference", "weights"),
    }


def test_inference_copy_needs_both_weights_training_only_its_own() -> None:
    needs = needed_assets(ppo(), copied=frozenset({"critic"}))
    own, copy = Asset("critic", "weights"), Asset("critic", "inference")
    assert needs["critic.values"] == {own, copy} and needs["actor.log_probs"] == {Asset("actor", "weights")}
    assert copy not in needs["critic.update"]


def test_stage_over_budget_is_named_with_its_needs() -> None:
    sizes = {Asset("actor", "weights"): 2_000, Asset("actor", "optimizer"): 6_000}
    with pytest.raises(UserError, match=r"actor.update .*8,000 bytes.*optimizer 6,000,.* weights 2,000"):
        residency_plan(Flow("grpo", [actor.generate(), train("actor")]), sizes, 7_000)


def test_sleeping_engine_frees_room_of_keys_and_values() -> None:
    flow = Flow("grpo", [actor.generate(), train("actor")])
    engine, weights, optimizer = Asset("actor", "engine"), Asset("actor", "weights"), Asset("actor", "optimizer")
    sizes = {engine: 6, weights: 2, optimizer: 6}
    assert residency_plan(flow, sizes, 9).kept == {weights}
    plan = residency_plan(flow, sizes, 9, asleep={engine: 1})
    assert plan.kept == {engine, weights} and sizes_during(flow, sizes, {engine: 1})["actor.update"][engine] == 1
    assert sizes_during(flow, sizes, {engine: 1})["actor.generate"][engine] == 6


def test_a_role_that_only_evaluations_generate_with_needs_its_engine_there_and_for_new_weights() -> None:
    flow = Flow("sft", [data.join_response(), train("actor")])
    engine, weights, optimizer = Asset("actor", "engine"), Asset("actor", "weights"), Asset("actor", "optimizer")
    sizes = {engine: 6, weights: 2, optimizer: 6}
    needs = needed_assets(flow, generating=["actor"])
    assert needs["evaluation of actor"] == {engine} and needs[PUBLISH] == {engine, weights}
    plan = residency_plan(flow, sizes, 9, asleep={engine: 1}, generating=["actor"])
    assert plan.kept == {engine, weights}, "the optimizer has no room beside keys and values"
    with pytest.raises(UserError, match="evaluation of actor needs 8 bytes"):
        residency_plan(flow, {**sizes, engine: 8, optimizer: 1}, 7, asleep={engine: 1}, generating=["actor"])


def test_an_engine_with_a_copy_of_frozen_weights_has_both_on_the_device_when_it_gets_them() -> None:
    flow = Flow("distilled", [reference.generate(), train("actor")])
    assert needed_assets(flow)[PUBLISH] == {Asset("reference", "engine"), Asset("reference", "weights")}
