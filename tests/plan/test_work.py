"""The three simulators count what can be counted by hand, and grow and shrink as they must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.cluster.device_kinds import known_kinds
from braidrl.config.layout import ParallelLayout
from braidrl.plan.choices import layouts
from braidrl.plan.problem import batch_lengths, spread
from braidrl.plan.rates import Rates, Work, price
from braidrl.plan.work import (
    Lengths,
    forward_operations,
    generate_work,
    infer_work,
    sent,
    share_received,
    train_work,
)
from braidrl.training.memory.footprint import model_shape
from braidrl.training.operations import decoding
from braidrl.weights.generation_layout import GenerationLayout
from tests.plan.problems import cluster, problem, write_sizes
from tests.tiny import MIXTURE, ROOT, load_module

shapes = load_module(ROOT / "examples" / "vision" / "shapes.py")

NODE = 8


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    return model_shape(write_sizes(tmp_path_factory.mktemp("m"), 64, 4, 4), torch.float32)


def rows(count: int = 64, prompt: int = 32, response: int = 96) -> Lengths:
    return Lengths(np.full(count, prompt), np.full(count, response))


def stepped(responses: list[int], slots: int, multiple: int) -> tuple[int, int]:
    """Count decoding step by step."""
    waiting, active, steps, computed = list(responses), [], 0, 0
    while waiting or active:
        while waiting and len(active) < slots:
            active.append(waiting.pop(0))
        steps += 1
        computed += -(-len(active) // multiple) * multiple
        active = [left - 1 for left in active if left > 1]
    return steps, computed


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 20))
def test_decoding_takes_the_steps_that_walking_through_it_takes(responses: list[int], slots: int) -> None:
    assert tuple(decoding(np.array(responses), slots)) == stepped(responses, slots, 1)


def test_operations_are_those_of_the_matrices_and_of_attention(shape) -> None:  # type: ignore[no-untyped-def]
    sizes = shape.sizes
    one_layer = 4 * 64 * 64 + 3 * 64 * 192
    matrices = 4 * one_layer + sizes.vocab_size * 64
    # Norms are no matrices, and are so few numbers that they do not matter.
    assert forward_operations(shape, 100, 0, False) == pytest.approx(2 * 100 * matrices, rel=0.01)
    assert forward_operations(shape, 0, 10.0, False) == 2 * 4 * 4 * 16 * 10


def test_training_is_three_forward_passes_and_recomputation_a_fourth(shape) -> None:  # type: ignore[no-untyped-def]
    layout = ParallelLayout(data=1)
    infer = infer_work(shape, layout, rows(), 1024, False, NODE)
    train = train_work(shape, layout, rows(), 1024, False, False, NODE)
    again = train_work(shape, layout, rows(), 1024, True, False, NODE)
    assert train.operations == pytest.approx(3 * infer.operations)
    assert again.operations == pytest.approx(4 * infer.operations)


def test_axes_divide_operations_and_a_pipeline_pays_its_bubble(shape) -> None:  # type: ignore[no-untyped-def]
    def work(**axes: int) -> Work:
        return infer_work(shape, ParallelLayout(**axes), rows(), 512, False, NODE)

    whole = work(data=1)
    for axes in ({"data": 4}, {"data": 1, "tensor": 4}, {"data": 2, "tensor": 2}):
        assert work(**axes).operations == pytest.approx(whole.operations / 4)
    # 64 rows of 128 tokens are 16 micro-batches: a pipeline of 2 idles one turn of 17.
    assert work(data=1, pipeline=2).operations == pytest.approx(whole.operations / 2 * 17 / 16)
    assert work(data=1, tensor=2).link > 0 and work(data=1, tensor=2).network == 0
    assert infer_work(shape, ParallelLayout(data=1, tensor=4), rows(), 512, False, 2).network > 0


def test_communication_counts_ring_all_reduce_and_gathers_per_micro_batch(shape) -> None:  # type: ignore[no-untyped-def]
    plain = train_work(shape, ParallelLayout(data=4), rows(), 4096, False, False, NODE)
    # Copies are summed once, before the optimizer's step; shards travel behind computing.
    assert plain.link == pytest.approx(2 * 3 / 4 * 4 * shape.parameters, rel=0.01) and plain.behind_link == 0
    full = train_work(shape, ParallelLayout(data=4, shard="full"), rows(), 4096, False, False, NODE)
    # One micro-batch: gathered twice and scattered once.
    assert full.behind_link == pytest.approx(3 * 3 / 4 * 4 * shape.parameters, rel=0.01)
    many = train_work(shape, ParallelLayout(data=4, shard="full"), rows(), 512, False, False, NODE)
    assert many.behind_link == pytest.approx(4 * full.behind_link)


def test_group_uses_the_network_adapters_of_all_its_devices() -> None:
    assert sent(8, 1, 8, 64.0).tolist() == [64.0, 0.0]
    # Whole nodes: a ring crosses between nodes once, and eight rings use eight adapters.
    assert sent(8, 1, 16, 64.0).tolist() == [0.0, 8.0]
    # One device of each node, or of each second one.
    assert sent(8, 8, 4, 64.0).tolist() == sent(8, 16, 4, 64.0).tolist() == [0.0, 64.0]


def test_decoding_reads_weights_once_a_step_and_slots_make_fewer_steps(shape) -> None:  # type: ignore[no-untyped-def]
    _, few = generate_work(shape, 1, 1, rows(), 16, 4, NODE)
    _, many = generate_work(shape, 1, 1, rows(), 64, 4, NODE)
    assert (few.steps, many.steps) == (4 * 96, 96)
    _, half = generate_work(shape, 1, 2, rows(), 32, 4, NODE)
    assert half.steps == 96 and half.operations == pytest.approx(many.operations / 2)
    _, divided = generate_work(shape, 2, 1, rows(), 64, 4, NODE)
    assert divided.operations == pytest.approx(many.operations / 2) and divided.link > 0
    long_tail = replace(rows(), responses=np.array([8] * 63 + [96]))
    _, tail = generate_work(shape, 1, 1, long_tail, 64, 4, NODE)
    assert tail.steps == 96 and tail.operations < few.operations / 5


def test_resharding_sends_only_missing_blocks_as_in_hybridflow_table_2() -> None:
    def received(train: ParallelLayout, *generation: object) -> float:
        return share_received(train, GenerationLayout(*generation))  # type: ignore[arg-type]

    train = ParallelLayout(data=2, tensor=4)
    # (t·p − t_g·p_g) / (t·p · t_g·p_g) of the model, of which the trainer's t·p is 4 and the engine's t_g·p_g 2.
    assert received(train, 1, 2) == pytest.approx((4 - 2) / (4 * 2))
    assert received(ParallelLayout(data=1, pipeline=2, tensor=4), 1, 2) == pytest.approx((8 - 2) / (8 * 2))
    assert received(train, 1, 4) == 0
    assert received(train, 1, 2, "neighbour") == pytest.approx(3 / 4)
    assert received(ParallelLayout(data=4, shard="full"), 1, 2, "gather") == pytest.approx(3 / 4)
    # Neighbours that do not nest: some rank trains nothing of what it generates with.
    assert received(ParallelLayout(data=4, tensor=2), 1, 8) == pytest.approx(1 / 8)


def test_overlapped_communication_costs_only_its_exposed_part() -> None:
    kind = known_kinds()["H100-80GB"]
    quick = price(Work("train", operations=1e15, behind_link=1e9), kind, Rates(), "bfloat16")
    slow = price(Work("train", operations=1e9, behind_link=1e12), kind, Rates(), "bfloat16")
    assert quick.communication == 0 and slow.communication > 1
    assert slow.bound == "communication" and quick.bound == "compute"


def test_every_kind_has_a_source_and_figures() -> None:
    kinds = known_kinds()
    makes = {"A100", "H100", "H200", "B200", "MI300X", "Ascend910B", "L40S", "L4", "RTX4090", "RTX3090", "cpu"}
    assert {name.partition("-")[0] for name in kinds} == makes
    assert all(kind.source and kind.peak["bfloat16"] > 0 and kind.memory > 0 for kind in kinds.values())


def test_given_lengths_have_their_median_and_longest(tmp_path: Path) -> None:
    config = problem(write_sizes(tmp_path / "m"), cluster(1, 1), rows=256).config
    lengths = batch_lengths(config, "20:60")
    assert np.median(lengths.responses) == pytest.approx(20, abs=1) and lengths.responses.max() == 60
    assert (batch_lengths(config, "20").responses == 20).all()
    assert (batch_lengths(config).responses == 64).all()
    assert spread(np.array([3, 1, 2]), 5).tolist()[::4] == [1, 0]


def test_expert_ranks_exchange_rows_and_sum_only_their_experts_gradients(tmp_path: Path) -> None:
    MIXTURE.save_pretrained(tmp_path)
    mixture, lengths = model_shape(tmp_path, torch.float32), rows()
    plain, by_experts = (
        train_work(mixture, ParallelLayout(data=4, expert=expert), lengths, 4096, False, False, NODE)
        for expert in (1, 4)
    )
    # Out and back, forward and backward; each token's two experts, of which three quarters are elsewhere.
    exchanged = 4 * 2 * 2 * (64 * 128 / 4) * 2 * MIXTURE.hidden_size * 4 * 3 / 4
    saved = 2 * mixture.experts * 4 * 3 / 4
    assert by_experts.link - plain.link == pytest.approx(exchanged - saved)
    assert by_experts.operations == plain.operations and by_experts.memory < plain.memory


def test_plans_search_the_expert_axis_of_mixtures_alone(shape, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    MIXTURE.save_pretrained(tmp_path)
    (group,) = cluster(1, 4).groups
    result = [layout.expert for layout in layouts(model_shape(tmp_path, torch.float32), 4, group, True, 128)]
    assert {1, 2, 4} == set(result)
    assert {layout.expert for layout in layouts(shape, 4, group, True, 128)} == {1}


def test_a_vision_tower_costs_by_patches_and_not_by_tokens_of_text(tmp_path: Path) -> None:
    model = model_shape(shapes.write_model(tmp_path, 0), torch.float32)
    layout, blind = ParallelLayout(data=1), replace(model, parameters=model.parameters - model.tower, tower=0)
    text, seen = rows(8), replace(rows(8), seen=16.0)
    assert infer_work(model, layout, text, 1024, False, NODE).operations == pytest.approx(
        infer_work(blind, layout, text, 1024, False, NODE).operations
    )
    # Each token stands for 2 x 2 patches.
    tower = 2 * model.tower * 16 * 4
    for samples, images in ((1, 8), (4, 2)):
        work = infer_work(model, layout, seen, 1024, False, NODE, samples)
        plain = infer_work(model, layout, text, 1024, False, NODE, samples)
        assert work.operations - plain.operations == pytest.approx(images * tower)
    for trains_tower, passes in ((False, 0), (True, 3)):
        work, plain = (
            train_work(model, layout, lengths, 1024, False, False, NODE, trains_tower=trains_tower)
            for lengths in (seen, text)
        )
        assert work.operations - plain.operations == pytest.approx(passes * 8 * tower)
    prefill, _ = generate_work(model, 1, 1, seen, 8, 4, NODE)
    plain, _ = generate_work(model, 1, 1, text, 8, 4, NODE)
    assert prefill.operations - plain.operations == pytest.approx(2 * tower)
