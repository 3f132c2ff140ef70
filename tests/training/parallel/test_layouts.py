"""Invariant 4 on many devices: gradient norm, gradients, log-probs and weights do not depend on the layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from braidrl.cluster.ranks import run_ranks
from braidrl.errors import UserError
from braidrl.training.backend_contract import CHECKS, BackendUnderTest
from braidrl.training.backends import BackendSpec
from braidrl.training.objective import Objective, denominators
from braidrl.training.roles.worker import RoleWorker
from tests.tiny import MIXTURE, MODELS, ROOT, TOKENIZER, load_module
from tests.training.parallel.laid_out import OBJECTIVE, alone, config_of, differences, make_rows, one_step

WAIT_S = 200.0
SOAKED = 12
"""Cases per set of processes: each makes about seven process groups, whose threads use time while they wait."""
# Each axis, each kind of shard and each model, and every two axes together.
PAIRWISE: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("qwen2", {"shard": "full"}),
        ("qwen3", {"shard": "optimizer"}),
        ("qwen2", {"tensor": 2}),
        ("llama", {"sequence": 2, "shard": "full"}),
        ("narrow qwen2", {"context": 2}),
        ("qwen3", {"pipeline": 2}),
    ],
    4: [
        ("qwen3", {"tensor": 2, "shard": "full"}),
        ("qwen2", {"sequence": 2, "shard": "optimizer"}),
        ("llama", {"tensor": 2, "sequence": 2}),
        ("qwen2", {"context": 2, "sequence": 2, "shard": "full"}),
        ("narrow qwen2", {"context": 4}),
        ("qwen3", {"context": 2, "pipeline": 2}),
        ("qwen2", {"pipeline": 2, "shard": "full"}),
        ("qwen3", {"pipeline": 2, "tensor": 2}),
        ("llama", {"pipeline": 2, "sequence": 2, "shard": "optimizer"}),
        ("qwen2", {"pipeline": 4}),
        ("qwen3", {"nodes": 2, "shard": "full"}),
        ("llama", {"tensor": 4}),
    ],
}
SAVED = {
    "one": [{"tensor": 2, "shard": "full"}, {"sequence": 2, "shard": "optimizer"}, {"pipeline": 2}],
    "two": [{"pipeline": 2, "shard": "full"}, {"tensor": 2}],
}
"""Layouts between which checkpoints resume; the first of each list saves.

(pipeline, tensor, data) is (1, 2, 2), and (2, 1, 2).
"""
LEFT_OUT = [{"pipeline": 4}, {"tensor": 4}, *SAVED["one"], *SAVED["two"]]
"""Skipped layouts of four ranks: their axis is tested with two ranks, or the checkpoint tests cover them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write the tiny models with eight heads and four key/value heads, so that they split over four ranks."""
    folder, paths = tmp_path_factory.mktemp("wide"), {}
    for seed, name in enumerate([*MODELS, "other qwen2"]):
        config = deepcopy(MODELS[name.removeprefix("other ")])
        config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 4, 4
        config.num_hidden_layers = 4
        if name != "llama":
            config.layer_types = ["full_attention"] * 4
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        TOKENIZER.save_pretrained(folder / name)
        paths[name] = str(folder / name)
    # Keys of one head, which `sequence` cannot divide, and windows that begin on another rank.
    config = deepcopy(MODELS["qwen2"])
    config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.num_hidden_layers = 8, 1, 4, 4
    config.layer_types, config.use_sliding_window = ["sliding_attention", "full_attention"] * 2, True
    config.sliding_window = 3
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "narrow qwen2")
    TOKENIZER.save_pretrained(folder / "narrow qwen2")
    paths["narrow qwen2"] = str(folder / "narrow qwen2")
    config = deepcopy(MODELS["qwen3"])
    config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.num_hidden_layers = 4, 2, 8, 2
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "two heads")
    TOKENIZER.save_pretrained(folder / "two heads")
    paths["two heads"] = str(folder / "two heads")
    torch.manual_seed(9)
    AutoModelForCausalLM.from_config(deepcopy(MIXTURE)).save_pretrained(folder / "mixture")
    TOKENIZER.save_pretrained(folder / "mixture")
    shapes = load_module(ROOT / "examples" / "vision" / "shapes.py")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    shapes.FAMILIES["qwen3_vl_moe"], shapes.TEXT["qwen3_vl_moe"] = shapes.FAMILIES["qwen3_vl"], experts
    for family in ("qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe"):
        paths[family] = str(shapes.write_model(folder / family, 0, family=family))
    return {**paths, "mixture": str(folder / "mixture")}


def in_ranks(size: int, cases: dict[str, Any], **more: Any) -> dict[str, list[str]]:
    problems: dict[str, list[str]] = run_ranks(
        "tests.training.parallel.laid_out:compare", {"cases": cases, **more}, size, WAIT_S
    )
    return problems


def test_two_ranks_give_the_result_of_one_process(models: dict[str, str]) -> None:
    cases = {f"{n} {layout}": (models[n], layout, "float64") for n, layout in PAIRWISE[2]}
    of_ranks = in_ranks(2, cases)
    assert of_ranks == {name: [] for name in of_ranks} and len(of_ranks) == len(cases)


@pytest.mark.soak
def test_two_ranks_copy_share_and_step_as_one_process_and_keep_the_contract(
    models: dict[str, str], tmp_path: Path
) -> None:
    # The contract of training backends, with an optimizer whose state has other names.
    momentum = {"optimizer": "sgd", "optimizer_settings": {"momentum": 0.9}}
    contract = [(models["qwen3"], {"shard": "full"}, momentum), (models["qwen2"], {"pipeline": 2}, {})]
    # Tied weights of a role with another sharding.
    layouts: list[dict[str, Any]] = [{"tensor": 2}, {"shard": "full"}, {"pipeline": 2}, {"tensor": 2}]
    copied = [(models["qwen2"], models["other qwen2"], pair) for pair in itertools.pairwise(layouts)]
    # Prompts shared by rows, and saved activations, where ranks shard the tokens between matrices.
    shared = [(models["qwen3"], layout, 24) for layout in ({"tensor": 2}, {"pipeline": 2})]
    kept = [(models["qwen3"], {"tensor": 2})]
    # An optimizer of whole matrices and of stacks of experts, which FSDP shards by rows and by experts.
    muon = {"optimizer": str(ROOT / "examples" / "plugins" / "muon.py:Muon"), "learning_rate": 1e-2}
    stepped = {
        f"muon {name} {layout}": (models[name], layout, muon)
        for name, layout in (("mixture", {"shard": "full"}), ("qwen3", {"tensor": 2}), ("qwen2", {"pipeline": 2}))
    }
    # Images that one of the ranks has. Qwen2.5-VL's tower computes its rope in float32.
    frozen, seen = {"max_tokens_per_device": 96}, {"train_vision": True, "max_tokens_per_device": 96}
    stepped["images full"] = (models["qwen3_vl"], {"shard": "full"}, seen)
    stepped["images pipeline"] = (models["qwen3_vl"], {"pipeline": 2}, seen)
    stepped["images expert"] = (models["qwen3_vl_moe"], {"expert": 2}, seen)
    stepped["images tensor"] = (models["qwen2_5_vl"], {"tensor": 2}, frozen)
    stepped["tower tensor"] = (models["qwen2_5_vl"], {"tensor": 2}, seen, False, 1e-5)
    contract += [(models["qwen3"], {"shard": "full"}, muon)]
    more = {"copied": copied, "shared": shared, "kept": kept, "stepped": stepped}
    of_ranks = in_ranks(2, {}, contract=contract, folder=str(tmp_path), **more)
    assert of_ranks == {name: [] for name in of_ranks} and len(of_ranks) == sum(map(len, more.values()))


@pytest.mark.soak
def test_four_ranks_agree_and_resume_checkpoints_of_other_layouts(models: dict[str, str], tmp_path: Path) -> None:
    model, everything = models["qwen2"], torch.arange(len(make_rows()))
    cases = {f"{n} {layout}": (models[n], layout, "float64") for n, layout in PAIRWISE[4] if layout not in LEFT_OUT}
    of_ranks = in_ranks(4, cases, saved=[(model, tried, str(tmp_path / name)) for name, tried in SAVED.items()])
    assert of_ranks == {name: [] for name in of_ranks} and len(of_ranks) == len(cases) + sum(map(len, SAVED.values()))

    source = load_file(Path(model, "model.safetensors"))
    for name, tried in SAVED.items():
        worker = RoleWorker(BackendSpec("actor", config_of(model), train=True))
        worker.load(tmp_path / name / "saved")
        assert differences(one_step(worker, everything, 2), alone(model, steps=2), everything) == []
        for number in range(len(tried)):
            export = load_file(tmp_path / name / f"export-{number}" / "model.safetensors")
            assert export.keys() == source.keys()
            assert all(torch.equal(tensor, source[name]) for name, tensor in export.items())
            assert AutoModelForCausalLM.from_pretrained(tmp_path / name / f"export-{number}").dtype == torch.float32
        refused_as_another_model(models["llama"], tmp_path / name / "saved")
        refused_as_damaged(worker, tmp_path / name / "saved")


# Reshard from the first to all others, and to files: tied weights on two stages, unequal parts, replicas.
RESHAPED: dict[int, list[tuple[str, list[dict[str, Any]], bool]]] = {
    2: [
        ("qwen2", [{"pipeline": 2}, {"tensor": 2}, {}], False),
        ("qwen3", [{"shard": "full"}, {"tensor": 2}, {"shard": "full"}], False),
        ("qwen2", [{"shard": "full"}, {"tensor": 2}], True),
        ("qwen3", [{"tensor": 2}, {}], True),
    ],
    4: [
        ("qwen2", [{"pipeline": 2, "shard": "full"}, {"tensor": 4}], False),
        ("qwen3", [{"tensor": 2, "shard": "full"}, {"pipeline": 4}], False),
        ("llama", [{"sequence": 2, "shard": "optimizer"}, {"nodes": 2, "shard": "full"}], False),
        ("qwen2", [{"pipeline": 2, "sequence": 2, "shard": "full"}, {"tensor": 2}], True),
    ],
}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_weights_reshard_to_other_layouts_and_files_exactly(models: dict[str, str], size: int) -> None:
    """Check bitwise equality, bucket limits, and that held blocks are not sent."""
    cases = [(models[name], layouts, lora) for name, layouts, lora in RESHAPED[size]]
    of_ranks = in_ranks(size, {}, reshaped=cases)
    assert of_ranks == {name: [] for name in of_ranks} and len(of_ranks) == sum(
        len(layouts) + 1 for _, layouts, _ in cases
    )


@pytest.mark.soak
@pytest.mark.parametrize("lora", [False, True])
def test_weights_go_from_every_layout_to_every_other(models: dict[str, str], lora: bool) -> None:
    layouts = [{}, *(layout for _, layout in PAIRWISE[4])]
    cases = [(models[name], [first, *layouts], lora) for first in layouts for name in ("qwen2", "qwen3")]
    of_ranks = in_ranks(4, {}, reshaped=cases)
    assert of_ranks == {name: [] for name in of_ranks}


@pytest.mark.soak
def test_every_rank_writes_and_hashes_its_files_of_one_checkpoint(models: dict[str, str], tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{"tensor": 2}, {"pipeline": 2}, {"shard": "full"}]
    cases = [(models[name], layouts[start:], str(tmp_path / name)) for name, start in (("qwen2", 0), ("mixture", 1))]
    of_ranks = in_ranks(2, {}, parts=cases)
    assert of_ranks == {name: [] for name in of_ranks} and len(of_ranks) == sum(len(tried) for _, tried, _ in cases)
    for name, start in (("qwen2", 0), ("mixture", 1)):
        for number in range(len(layouts) - start):
            folder = tmp_path / name / f"saved-{number}"
            files = list(folder.glob("model-*.safetensors"))
            assert len(files) > 2 and (folder / "model.safetensors.index.json").is_file()
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
            expected = alone(models[name])
            for tensor, value in loaded.items():
                torch.testing.assert_close(value, expected[f"weight {tensor}"], rtol=1e-7, atol=1e-7)
            stored = {key for file in files for key in load_file(file)}
            assert stored == load_file(Path(models[name], "model.safetensors")).keys(), "the hub's names"


def refused_as_another_model(model: str, saved: Path) -> None:
    other = RoleWorker(BackendSpec("actor", config_of(model), train=True))
    before = [p.detach().clone() for p in other.model.parameters()]
    with pytest.raises(UserError, match="holds another model") as caught:
        other.load(saved)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(p, q) for p, q in zip(other.model.parameters(), before, strict=True))


def refused_as_damaged(worker: RoleWorker, saved: Path) -> None:
    file = saved / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match="is damaged or incomplete") as caught:
        worker.load(saved)
    assert "\n" not in str(caught.value)
    file.unlink()
    with pytest.raises(UserError, match="is damaged or incomplete"):
        worker.load(saved)


@pytest.mark.parametrize("check", CHECKS)
def test_one_process_keeps_the_contract_of_training_backends(
    check: Callable[[BackendUnderTest], None], models: dict[str, str], tmp_path: Path
) -> None:
    config, rows = config_of(models["llama"]), make_rows()
    check(
        BackendUnderTest(
            lambda: RoleWorker(BackendSpec("actor", config, train=True)),
            Objective.of("actor", OBJECTIVE),
            rows,
            {"tokens": denominators(rows)["tokens"]},
            tmp_path / "exported",
            lambda: None,
            True,
        )
    )


@pytest.mark.soak
def test_four_context_ranks_of_two_sequence_ranks_give_the_result_of_one_process(models: dict[str, str]) -> None:
    # Two heads of keys and values, which `sequence` divides between its ranks; rows of 2 to 60 tokens.
    layouts: list[dict[str, Any]] = [
        {"context": 4, "sequence": 2},
        {"context": 4, "sequence": 2, "shard": "full"},
        {"context": 2, "sequence": 2, "shard": "optimizer"},
        {"context": 4, "pipeline": 2},
    ]
    cases = {str(layout): (models["two heads"], layout, "float64") for layout in layouts}
    assert in_ranks(8, cases, limit=1e-9) == {name: [] for name in cases}


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_product_of_axes_and_shards_gives_the_result_of_one_process(size: int, models: dict[str, str]) -> None:
    cases, kinds, dtypes = {}, list(MODELS), ["float64"] if size > 2 else ["float64", "float32"]
    for number, (layout, dtype) in enumerate(itertools.product(every_layout(size), dtypes)):
        # With four and eight processes each layout uses one of the models, and each kind of shard uses all of them.
        for name in kinds if size == 2 else [kinds[number % len(kinds)]]:
            cases[f"{name} {layout} {dtype}"] = (models[name], layout, dtype)
    problems: dict[str, list[str]] = {}
    for start in range(0, len(cases), SOAKED):
        problems |= in_ranks(size, dict(list(cases.items())[start : start + SOAKED]))
    assert problems == {name: [] for name in cases}


def every_layout(size: int) -> list[dict[str, Any]]:
    """Return every layout of this many devices, with each kind of shard, also over two nodes."""
    problems: list[dict[str, Any]] = []
    for shard in ("full", "optimizer", "none"):
        for pipeline, tensor, sequence, context in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2)):
            data, left = divmod(size, pipeline * tensor * sequence * context)
            if left or tensor * sequence > 4:
                continue
            problems.append(
                {"pipeline": pipeline, "tensor": tensor, "sequence": sequence, "context": context, "shard": shard}
            )
            if shard != "none" and data > 1:
                problems.append({**problems[-1], "nodes": 2})
    return problems
