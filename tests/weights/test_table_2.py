"""HybridFlow's Table 2 (arXiv 2409.19256) on processes that count bytes: what a rank receives, holds and holds twice
between phases.

Of a model of M bytes, trained in pipeline p, tensor t, data d and generated with in pipeline p_g, tensor t_g:

                    DeepSpeed-Chat (gather)     HybridFlow-V (neighbour)     HybridFlow (interval)
received            (tpd - 1) / tpd · M         (tp - 1) / tp · M            (tp - t_g p_g) / (t_g p_g t p) · M
peak memory         M                           M                            M / (t_g p_g)
redundancy          M / tpd                     M / tp                       0

M are the matrices of the layers. What is not divided so is counted by name: norms, which every tensor rank holds, and
the embedding and the output layer, which only the first and the last pipeline rank have.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from braidrl.cluster.ranks import run_ranks
from braidrl.config.layout import ParallelLayout
from braidrl.errors import UserError
from braidrl.weights.generation_layout import GenerationLayout
from tests.engines.vllm.hosted_runs import hosted, write_wide_model
from tests.tiny import TOKENIZER
from tests.weights.transitions import GROUPINGS, LAYOUTS

RANKS, ITEM = 8, 8
"""The most ranks, and the bytes of a number."""
Layouts = tuple[tuple[int, int, int], tuple[int, int]]
ON_FOUR: dict[str, Layouts] = {
    "1-4-1 to 1-2": ((1, 4, 1), (1, 2)),
    "1-2-2 to 1-1": ((1, 2, 2), (1, 1)),
    "2-2-1 to 1-2": ((2, 2, 1), (1, 2)),
}
CASES = list(itertools.product(LAYOUTS, GROUPINGS))
SOON = [
    ("1-4-1 to 1-2", "interval"),
    ("2-2-1 to 1-2", "interval"),
    ("1-4-1 to 1-2", "neighbour"),
    ("1-2-2 to 1-1", "gather"),
]
"""Each formula on four ranks; the formula of intervals with and without stages."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model whose matrices divide evenly over eight ranks."""
    folder = tmp_path_factory.mktemp("eight")
    config = Qwen3Config(
        vocab_size=-(-len(TOKENIZER) // RANKS) * RANKS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=8,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def measured(model: str, chosen: list[tuple[str, str]]) -> dict[str, list[dict[str, Any]]]:
    """Return each rank's measurements, by case and grouping."""
    cases = {}
    for name, grouping in chosen:
        training, generation = (LAYOUTS | ON_FOUR)[name]
        cases[f"{name} {grouping}"] = (layout_of(training, grouping), *generation, grouping)
    result: dict[str, Any] = run_ranks(
        "tests.weights.transitions:measure", {"model": model, "cases": cases}, math.prod(training), 300.0
    )
    return result


def kind(name: str) -> str:
    if "norm" in name:
        return "norms"
    return "matrices" if "layers" in name else "ends"


def sizes(model: str) -> dict[str, int]:
    """Bytes of each tensor."""
    return {n: p.numel() * ITEM for n, p in AutoModelForCausalLM.from_pretrained(model).named_parameters()}


def of_kind(sizes: dict[str, int], *kinds: str) -> int:
    return sum(size for name, size in sizes.items() if kind(name) in kinds)


@pytest.mark.parametrize(
    "chosen",
    [SOON, pytest.param(CASES, marks=pytest.mark.soak)],
    ids=["each formula", "the paper's table"],
)
def test_a_rank_receives_and_holds_what_the_formula_says(model: str, chosen: list[tuple[str, str]]) -> None:
    result, every = measured(model, chosen), sizes(model)
    for case, grouping in chosen:
        assert_as_in_the_table(result[f"{case} {grouping}"], every, (LAYOUTS | ON_FOUR)[case], grouping)


def assert_as_in_the_table(
    ranks: list[dict[str, Any]], every: dict[str, int], layouts: Layouts, grouping: str, item: int = ITEM
) -> None:
    (p, t, d), (p_g, t_g) = layouts
    m = sum(size for name, size in every.items() if kind(name) == "matrices")
    received, peak, redundant = {
        "gather": (m * (t * p * d - 1) // (t * p * d), m, m // (t * p * d)),
        "neighbour": (m * (t * p - 1) // (t * p), m, m // (t * p)),
        "interval": (m * (t * p - t_g * p_g) // (t_g * p_g * t * p), m // (t_g * p_g), 0),
    }[grouping]
    for rank in ranks:
        trained, generated = (
            {name: count * item for name, count in rank[phase].items()} for phase in ("trained", "generated")
        )
        assert rank["problems"] == []
        # What comes on top: all that generation wants of norms, embedding and output layer, less what the rank has.
        held = generated if grouping == "interval" else every
        ends = {
            name: generated[name] if grouping == "interval" else every[name]
            for name in held
            if kind(name) != "matrices"
        }
        lacking = sum(size - trained.get(name, 0) for name, size in ends.items())
        assert rank["received"] == received + lacking
        assert rank["redundant"] == (redundant + of_kind(trained, "norms", "ends") if grouping != "interval" else 0)
        # A slice is there twice while it is copied, or cut out of its gathered tensor: one at a time.
        # vLLM keeps the projections of a layer side by side, as one.
        sizes = {tuple(names): sum(generated[name] for name in names) for names in rank["together"]}
        once = there_twice(trained, sizes) if grouping == "interval" else cut_out(every, sizes)
        assert rank["peak"] == peak + sum(ends.values()) + once
        assert once <= max(sizes.values())


def there_twice(trained: dict[str, int], sizes: dict[tuple[str, ...], int]) -> int:
    """Return the most bytes beyond those of generation while own slices are copied, the largest tensor first."""
    most, to_come = 0, 0
    for names in sorted(sizes, key=lambda names: -sizes[names])[::-1]:
        own = sum(trained.get(name, 0) for name in names)
        most = max(most, own - to_come)
        to_come += sizes[names] - own
    return most


def cut_out(every: dict[str, int], sizes: dict[tuple[str, ...], int]) -> int:
    """Return the most bytes beyond those of the whole model while slices are cut out, the smallest tensor first."""
    most, freed = 0, sum(every.values()) - sum(every[name] for names in sizes for name in names)
    for names in sorted(sizes, key=lambda names: sizes[names]):
        most = max(most, sizes[names] - freed)
        freed += sum(every[name] for name in names) - sizes[names]
    return most


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_vllms_ranks_receive_and_hold_what_the_formula_says(tmp_path: Path) -> None:
    """Four ranks, whose generation weights are vLLM's live parameters."""
    model = str(write_wide_model(tmp_path / "wide"))
    cases = {
        f"{name} {grouping}": (layout_of(training, grouping), *generation, grouping, True)
        for name, (training, generation) in ON_FOUR.items()
        for grouping in GROUPINGS
    }
    result = hosted({"measure": {"model": model, "cases": cases}, "workers": 4}, tmp_path)
    every = {name: size // 2 for name, size in sizes(model).items()}
    for name, layouts in ON_FOUR.items():
        for grouping in GROUPINGS:
            assert_as_in_the_table(result[f"{name} {grouping}"], every, layouts, grouping, ITEM // 2)
            rank = result[f"{name} {grouping}"][0]
            print(f"{name} {grouping}: received {rank['received']}, peak {rank['peak']}, twice {rank['redundant']}")


def layout_of(training: tuple[int, int, int], grouping: str) -> dict[str, Any]:
    """DeepSpeed-Chat trains with ZeRO-3 among all ranks."""
    p, t, d = training
    return {"shard": "full"} if grouping == "gather" else {"pipeline": p, "tensor": t, "data": d}


def test_the_groups_are_those_of_the_paper() -> None:
    """Figure 8: training 1-4-2, generation in tensor 2. Training slices lie in generation slices at intervals alone."""
    training = ParallelLayout(tensor=4, data=2)
    assert GenerationLayout(1, 2, "interval").groups(training).flatten(1).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert GenerationLayout(1, 2, "neighbour").groups(training).flatten(1).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    both = ParallelLayout(pipeline=2, tensor=2, data=2)
    assert GenerationLayout(2, 1, "interval").groups(both).flatten(1).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert GenerationLayout(1, 2, "interval").groups(both).flatten(1).tolist() == [[0, 1], [4, 5], [2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("generation", "training", "words"),
    [
        (
            GenerationLayout(1, 3),
            ParallelLayout(data=8),
            "rollout.tensor=3: 8 ranks .*divide",
        ),
        (GenerationLayout(2, 3), ParallelLayout(data=8), "rollout.tensor=3 times pipeline=2: 8 ranks"),
        (GenerationLayout(1, 4, "interval"), ParallelLayout(tensor=2, data=4), "training has pipeline=1, tensor=2"),
        (GenerationLayout(1, 2, "neighbour"), ParallelLayout(data=8, shard="full"), "write grouping=gather"),
        (GenerationLayout(1, 2, "gather"), ParallelLayout(tensor=2, data=4), "write shard=full and nodes=1"),
    ],
)
def test_a_grouping_that_a_layout_cannot_have_is_one_line(
    generation: GenerationLayout, training: ParallelLayout, words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        generation.check(training, 8)
    assert "\n" not in str(caught.value)
