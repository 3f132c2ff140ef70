"""Device usage of stages matches a count by hand for a few rows, over one process and over several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from braidrl.agents.trajectory import Trajectory
from braidrl.data.rows import FinishReason
from braidrl.engines.deployment import Engines
from braidrl.flow import Kind, Stage
from braidrl.observe.metrics import REQUIRED_KEYS, Sums
from braidrl.runtimes.step_metrics import summary
from braidrl.runtimes.usage import DeviceUsage, Drawn
from braidrl.training.memory.footprint import model_shape
from braidrl.training.operations import DeviceRates, MatrixSizes, decoding_bytes
from tests.engines.tiny import response_of
from tests.tiny import Workshop

GENERATE = Stage("actor.generate", "generate", "actor", kind=Kind.GENERATE)
BANDWIDTH = "utilisation/bandwidth/actor.generate"
RATES = DeviceRates({"float32": 1e12}, 1e9)
DRAWN = Drawn(np.array([3, 1, 2, 0]), np.array([30, 10, 21, 0]))


def usage_of(workshop: Workshop, rates: DeviceRates | None = RATES, **sections: object) -> DeviceUsage:
    config = workshop.config(**sections)
    usage = DeviceUsage(config, Engines.of(config))
    usage.rates = rates
    return usage


def sizes_of(workshop: Workshop) -> MatrixSizes:
    shape = model_shape(workshop.model, torch.float32)
    return MatrixSizes.of(shape.sizes, shape.parameters, False)


@pytest.mark.parametrize(("slots", "steps"), [(16, 3), (2, 3), (1, 6)])
def test_decoding_reads_weights_and_context_each_step(workshop: Workshop, slots: int, steps: int) -> None:
    sums = Sums()
    usage_of(workshop).decoded(GENERATE, DRAWN, slots, 2.0, sums)
    assert sums.pairs() == {BANDWIDTH: (decoding_bytes(sizes_of(workshop), 4, steps, 61), 2e9)}


def test_rows_among_others_read_their_share_of_the_steps_weights(workshop: Workshop) -> None:
    sums = Sums()
    usage_of(workshop).decoded(GENERATE, Drawn(*(counts[:1] for counts in DRAWN)), 16, 2.0, sums, peak_rows=4)
    assert sums.pairs()[BANDWIDTH][0] == decoding_bytes(sizes_of(workshop), 4, 0.75, 30)


def test_an_engine_in_bfloat16_reads_half(workshop: Workshop) -> None:
    sums, rollout = Sums(), {"dtype": "bfloat16", "slots": 16}
    usage_of(workshop, rollout=rollout).decoded(GENERATE, DRAWN, 16, 2.0, sums)
    assert sums.pairs()[BANDWIDTH][0] == decoding_bytes(sizes_of(workshop), 2, 3, 61)


@pytest.mark.parametrize("rollout", [{"tensor": 2}, {"engines": 2}])
def test_device_usage_counts_the_weights_that_ranks_and_engines_read(
    workshop: Workshop, rollout: dict[str, int]
) -> None:
    """Each of two ranks reads half of the weights in each step; two engines read all weights, each for its own
    slots.
    """
    sums = Sums()
    usage_of(workshop, rollout={**rollout, "slots": 1}).decoded(GENERATE, DRAWN, 2, 2.0, sums)
    weights = {"tensor": 6 / 2, "engines": 3 * 2}[next(iter(rollout))]
    assert sums.pairs()[BANDWIDTH][0] == decoding_bytes(sizes_of(workshop), 4, weights, 61)


def test_unknown_rates_and_servers_report_no_share(workshop: Workshop) -> None:
    sums, servers = Sums(), {"engine": "http", "servers": {"urls": ["http://localhost:1"]}}
    usage_of(workshop, None).decoded(GENERATE, DRAWN, 16, 2.0, sums)
    usage_of(workshop, rollout=servers).decoded(GENERATE, DRAWN, 16, 2.0, sums)
    assert sums.pairs() == {}


def test_share_over_processes_is_total_work_over_total_capacity(workshop: Workshop) -> None:
    parts, fast = [Sums(), Sums()], replace(RATES, bandwidth=3e9)
    usage_of(workshop).decoded(GENERATE, DRAWN, 16, 2.0, parts[0])
    usage_of(workshop, fast).decoded(GENERATE, DRAWN, 16, 4.0, parts[1])
    read = decoding_bytes(sizes_of(workshop), 4, 3, 61)
    assert Sums().merge(*parts).means()[BANDWIDTH] == pytest.approx(2 * read / (2e9 + 12e9))


def test_single_turn_episode_counts_like_plain_generation() -> None:
    trajectory = Trajectory((0, 0, 0))
    trajectory.append([5, 6, 7], opens=True)
    plain = response_of((0, 0, 0), torch.tensor([1, 2]), FinishReason.LENGTH)
    trajectory.append([1, 2], per_token=plain.per_token)
    assert [*Drawn.played([trajectory])] == [*Drawn.after([3], [plain])] == [2, 3 + 4]
    trajectory.append([8], opens=True)
    trajectory.append([9], per_token=response_of((0, 0, 0), torch.tensor([9]), FinishReason.LENGTH).per_token)
    assert [*Drawn.played([trajectory])] == [3, 3 + 4 + 1]


def test_memory_is_reported_for_stages_with_a_model(workshop: Workshop) -> None:
    sums, usage = Sums(), usage_of(workshop)
    with usage.memory_of(GENERATE.name, sums), usage.memory_of(None, sums):
        pass
    assert list(sums.means()) == ["memory/actor.generate/resident_max"]
    assert sums.means()["memory/actor.generate/resident_max"] > 1 << 24


def test_terminal_shows_loss_and_accuracy_of_the_trained_role() -> None:
    metrics: dict[str, float | int | None] = dict.fromkeys(REQUIRED_KEYS)
    metrics |= {"step": 3, "loss/reward": 0.5, "reward/accuracy": 0.75, "reward/grad_norm": 2.0}
    assert summary(metrics) == "step 3  loss 0.5000  accuracy 0.750  grad norm 2.000"
    metrics |= {"loss/actor": 0.25, "loss/critic": 9.0, "critic/grad_norm": 9.0}
    assert summary(metrics) == "step 3  loss 0.2500"


def test_terminal_shows_shares_peak_memory_and_update_seconds() -> None:
    metrics: dict[str, float | int | None] = dict.fromkeys(REQUIRED_KEYS)
    metrics |= {
        "step": 3,
        "utilisation/operations/actor.update": 0.4321,
        BANDWIDTH: 0.5,
        "weights/actor/update_seconds": 0.25,
        "memory/actor.update/allocated_max": 1 << 30,
        "memory/actor.generate/reserved_max": 3 << 30,
    }
    told = "MFU 43%  bandwidth 50%  memory 3.00 GiB  weights 0.25 s"
    assert summary(metrics) == f"step 3  {told}"
