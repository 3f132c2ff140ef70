"""Slots and tokens per micro-batch are sized to the free memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import World
from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.runtimes import sizing
from braidrl.runtimes.evaluation import evaluate_model
from braidrl.runtimes.memory.budget import GIB, MIB
from braidrl.runtimes.prepare.setup import prepare, without_data
from braidrl.runtimes.sizing import (
    MOST_SLOTS,
    MOST_TOKENS,
    RESERVE,
    SLOT_MULTIPLE,
    TOKEN_MULTIPLE,
    Demand,
    fitting_sizes,
    with_fitting_sizes,
)
from braidrl.training.role_settings import slots_of
from tests.tiny import Workshop

FOLLOWING = Path(__file__).with_name("following.yaml")

SEVEN_B = Demand(stays=30 * GIB, training=GIB, token=2 * MIB, slot=112 * MIB, longest=2048, rows=1024)
"""About the memory of a 7B model that is trained by adapters on rows of 2,048 tokens."""


@pytest.mark.parametrize(
    ("gib", "changes", "expected"),
    [
        (80, {}, (384, 20480)),
        (80, {"rows": 100}, (112, 20480)),
        (80, {"together": True}, (192, 10240)),
        (141, {}, (880, 48128)),
        (40, {}, (48, 2048)),
        (24, {}, (16, 2048)),
        (80, {"slot": 0}, (None, 20480)),
        (80, {"token": 0}, (384, None)),
        (80, {"token": 0, "together": True}, (384, None)),
        (1000, {}, (1024, 65536)),
        (80, {"token": 1, "rows": 3}, (16, 6144)),
    ],
)
def test_sizes_of_a_model_of_7b(gib: int, changes: dict[str, int], expected: tuple[int | None, int | None]) -> None:
    assert fitting_sizes(gib * GIB, Demand(**{**vars(SEVEN_B), **changes})) == expected


size = st.integers(1, 1 << 40)
demands = st.builds(
    Demand,
    stays=size,
    training=size,
    token=st.integers(0, 1 << 24),
    slot=st.integers(0, 1 << 34),
    longest=st.integers(1, 40_000),
    rows=st.integers(1, 10_000),
    together=st.booleans(),
)


@given(st.integers(0, 1 << 40), demands)
def test_chosen_sizes_fit_unless_minimum_does_not(free: int, demand: Demand) -> None:
    slots, tokens = fitting_sizes(free, demand)
    assert (slots is None, tokens is None) == (demand.slot == 0, demand.token == 0)
    room = int(free * (1 - RESERVE)) - demand.stays
    caches, training = (slots or 0) * demand.slot, (tokens or 0) * demand.token + (demand.training if tokens else 0)
    if slots is not None:
        assert slots % SLOT_MULTIPLE == 0 and SLOT_MULTIPLE <= slots <= MOST_SLOTS
        assert slots < demand.rows + SLOT_MULTIPLE
        assert slots == SLOT_MULTIPLE or caches <= room
    if tokens is not None:
        assert demand.longest <= tokens <= max(demand.longest, MOST_TOKENS, TOKEN_MULTIPLE)
        assert tokens == demand.longest or training <= room
    if demand.together and slots not in (None, SLOT_MULTIPLE) and tokens not in (None, demand.longest):
        assert caches + (training if tokens else 0) <= room


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 38), demands)
def test_more_memory_never_makes_less_of_it(free: int, more: int, demand: Demand) -> None:
    for less, larger in zip(fitting_sizes(free, demand), fitting_sizes(free + more, demand), strict=True):
        assert less is None or (larger is not None and less <= larger)


def test_slots_that_are_chosen_on_a_cpu_are_those_of_a_step_and_vllm_chooses_its_own(workshop: Workshop) -> None:
    rollout = {"slots": "auto", "samples_per_prompt": 12}
    sized, (line,) = with_fitting_sizes(prepare(workshop.config(rollout=rollout)), None)
    assert (sized.config.rollout.slots, sized.config.trainer.max_tokens_per_device) == (48, None)
    assert "rollout.slots=48" in line
    served, lines = with_fitting_sizes(prepare(workshop.config(rollout={**rollout, "engine": "vllm"})), None)
    assert (served.config.rollout.slots, slots_of(served.config), lines) == ("auto", 48, [])


def sizes_of(world: World, task: dict[str, Any]) -> list[list[int]]:
    """Return the sizes that each rank chooses, on devices of which the second has half the memory of the first."""
    sizing.device_memory = lambda name, free=False: 64 * MIB >> world.rank
    prepared, _ = sizing.prepared_to_fit(parse_config(task["config"]), world)
    own = prepared.config.rollout.slots, prepared.config.trainer.max_tokens_per_device
    return [json.loads(bytes(one)) for one in world.gather("sizes", json.dumps(own).encode())]


def test_all_ranks_take_the_sizes_of_the_device_with_the_least_memory(workshop: Workshop) -> None:
    settings = {"rollout": {"slots": None}, "trainer": {"prompts_per_step": 1024}, "runtime": "distributed"}
    tree = workshop.tree(**settings, workers=2)
    first, second = run_ranks("tests.runtimes.test_sizing:sizes_of", {"config": tree}, 2, 200.0)
    sized, _ = with_fitting_sizes(prepare(parse_config(tree)), 32 * MIB)
    assert first == second == [sized.config.rollout.slots, sized.config.trainer.max_tokens_per_device]
    alone, _ = with_fitting_sizes(prepare(parse_config(tree)), 64 * MIB)
    assert alone.config.rollout.slots != sized.config.rollout.slots


@pytest.mark.parametrize("runtime", ["eager", "streaming"])
def test_slots_of_an_evaluation_alone_are_those_of_its_own_rows_without_the_memory_of_training(
    workshop: Workshop, runtime: str
) -> None:
    sections = {
        "rollout": {"slots": None, "compile": False},
        "data": {"eval": {"held_out": str(workshop.data)}},
        "runtime": runtime,
        "evaluation": {"samples": 3, "max_prompts": 11},
        "flow": "ppo",
        "algorithm": {"reward": "verify"},
    }
    sized, _ = with_fitting_sizes(prepare(workshop.config(**sections), train=False), GIB)
    assert (sized.config.rollout.slots, sized.config.trainer.max_tokens_per_device) == (48, None)
    (demand,) = sizing.demands(sized)
    assert demand.stays < max(one.stays for one in sizing.demands(prepare(workshop.config(**sections)))) / 3


def test_braid_eval_chooses_its_slots(workshop: Workshop) -> None:
    sections = {
        "rollout": {"slots": "auto"},
        "data": {"eval": {"held_out": str(workshop.data)}},
        "evaluation": {"max_prompts": 2},
    }
    config = workshop.config(**sections)
    evaluate_model(config)
    (made,) = config.output.glob("eval-*")
    assert yaml.safe_load((made / "config.yaml").read_text())["rollout"]["slots"] == 16


def test_an_evaluation_on_a_device_that_is_not_there_is_refused_in_one_line(workshop: Workshop) -> None:
    config = workshop.config(device="cuda", data={"eval": {"held_out": str(workshop.data)}})
    with pytest.raises(UserError, match=r"device=cuda: .*no CUDA device"):
        evaluate_model(config)


def test_a_role_that_follows_another_has_no_optimizer_on_the_devices_of_any_runtime(workshop: Workshop) -> None:
    sections = {"flow": str(FOLLOWING), "rollout": {"slots": None}}
    result = []
    for runtime in ("hybrid", "streaming"):
        groups = sizing.device_groups(without_data(workshop.config(runtime=runtime, **sections)).deployment)
        result.append({use.role: use.trained for group in groups for use in group.uses if not use.is_separate})
    assert result[0] == result[1] == {"actor": True, "reference": False}
