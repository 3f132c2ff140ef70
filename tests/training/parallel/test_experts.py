"""Expert parallelism: gradients, their norm and weights are those of one process, whatever ranks share the experts."""

from __future__ import annotations

import os
import signal
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from braidrl.cluster.ranks import run_ranks
from braidrl.config.layout import ParallelLayout
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.training.backends import BackendSpec
from braidrl.training.loading import load_decoder
from braidrl.training.parallel.experts import check_experts, experts_of
from braidrl.training.roles.worker import RoleWorker
from tests.invariants.traces import EVERY_STEP, merged, weights
from tests.tiny import MIXTURE, TOKENIZER, Workshop, braid, metrics_agree, sums, wait_for_steps, write_jsonl
from tests.training.decoders.families import write_family
from tests.training.parallel.laid_out import EXPERT_ADAPTERS, JETMOE_ADAPTERS, config_of, make_rows, one_step

WAIT_S = 200.0
EXPERT: dict[str, Any] = {"expert": 2}
"""Experts over data ranks, of which the last has no rows: it joins with empty micro-batches."""
LAYOUTS: dict[int, dict[str, list[dict[str, Any]]]] = {
    2: {
        "data": [EXPERT, {}, {"tensor": 2}],
        "full": [{**EXPERT, "shard": "full"}, EXPERT],
        "tensor": [{**EXPERT, "tensor": 2}],
        "sequence": [{**EXPERT, "sequence": 2}],
    },
    4: {
        "four": [{"expert": 4}, EXPERT, {}],
        "copies": [EXPERT, {**EXPERT, "shard": "full"}],
        "full": [{**EXPERT, "shard": "full"}, {"expert": 4, "shard": "full"}],
        "optimizer": [{**EXPERT, "shard": "optimizer"}],
        "tensor": [{**EXPERT, "tensor": 2, "shard": "full"}],
        "over tensor and data": [{"expert": 4, "tensor": 2}],
        "pipeline": [{**EXPERT, "pipeline": 2}, {"pipeline": 2}],
    },
}
"""Layouts by name: the first of each list trains and saves, and the others resume."""
DECAY = {"weight_decay": 10.0}
BALANCE = {"balance": {"auxiliary": 0.3, "z": 0.1}}
BALANCED: dict[int, list[dict[str, Any]]] = {
    2: [{**EXPERT, "sequence": 2, "shard": "full"}, {**EXPERT, "tensor": 2}, {"pipeline": 2}],
    4: [
        EXPERT,
        {"expert": 4, "context": 2, "shard": "full"},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "sequence": 2, **EXPERT},
    ],
}
"""Layouts with losses of routers, in which all ranks replay routes that no router would choose."""
ADAPTED: dict[int, list[dict[str, Any]]] = {
    2: [EXPERT],
    4: [
        {**EXPERT, "shard": "full"},
        {"expert": 4, "tensor": 2},
        {"tensor": 2, "shard": "full"},
        {**EXPERT, "pipeline": 2},
        {},
    ],
}
"""Layouts of adapters on experts: each resumes from the one before."""


OTHERS: dict[str, list[dict[str, Any]]] = {
    "inkling_text": [EXPERT],
    "llama4_text": [EXPERT],
    "jetmoe": [EXPERT, {**EXPERT, "shard": "full"}, {**EXPERT, "sequence": 2}],
    "longcat_flash": [EXPERT, {**EXPERT, "shard": "full"}],
}
"""Layouts of models that run once for each length of rows, and of experts without transformers' common forward."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(9)
    AutoModelForCausalLM.from_config(deepcopy(MIXTURE)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_ranks_that_share_experts_give_the_result_of_one_process(mixture: str, size: int, tmp_path: Path) -> None:
    cases = {name: (mixture, layouts) for name, layouts in LAYOUTS[size].items()}
    indexer = str(write_family(tmp_path / "indexer", "deepseek_v32"))
    stepped = {"parameters without a gradient": (indexer, EXPERT, DECAY)} if size == 2 else {}
    task = {"cases": {}, "experts": cases, "stepped": stepped, "folder": str(tmp_path)}
    of_ranks = run_ranks("tests.training.parallel.laid_out:compare", task, size, WAIT_S)
    assert of_ranks == {name: [] for name in (*cases, *stepped)}


def test_an_indexer_has_no_gradient_so_that_it_stays_and_its_run_is_resumed(tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", "deepseek_v32")
    workers = [RoleWorker(BackendSpec("actor", config_of(str(model), **DECAY), train=True)) for _ in range(2)]
    before = {name: tensor.clone() for name, tensor in workers[0].full_state_dict().items()}
    every_row = torch.arange(len(make_rows()))
    first = one_step(workers[0], every_row)
    changed = {name for name, tensor in before.items() if not torch.equal(first[f"weight {name}"], tensor)}
    assert {name for name in before.keys() - changed if name.endswith("weight")} == {
        name for name in before if ".indexer." in name and name.endswith("weight")
    }
    workers[0].export(tmp_path / "saved")
    workers[1].load(tmp_path / "saved")
    second, resumed = (one_step(worker, every_row, 2) for worker in workers)
    for name, tensor in second.items():
        # transformers reads routers in float32.
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.soak
def test_experts_of_models_by_rows_and_of_other_forms_are_shared_while_layers_are_recomputed(tmp_path: Path) -> None:
    folders = {name: str(write_family(tmp_path / name, name)) for name in OTHERS}
    cases = {f"{name} under {layout}": (folders[name], layout, {}) for name in OTHERS for layout in OTHERS[name]}
    layouts = [EXPERT, {**EXPERT, "shard": "full"}]
    targets = {"llama4_text": EXPERT_ADAPTERS, "jetmoe": JETMOE_ADAPTERS}
    adapted = {f"adapters of {name}": (folders[name], layouts, targets[name]) for name in targets}
    task = {"cases": {}, "stepped": cases, "adapted": adapted, "folder": str(tmp_path)}
    of_ranks = run_ranks("tests.training.parallel.laid_out:compare", task, 2, WAIT_S)
    assert of_ranks == {name: [] for name in (*cases, *(f"{name} under {lay}" for name in adapted for lay in layouts))}


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_experts_balance_and_adapt_as_one_process(mixture: str, size: int, tmp_path: Path) -> None:
    balanced = {f"balance under {layout}": (mixture, layout, BALANCE, True) for layout in BALANCED[size]}
    adapted = {"adapters": (mixture, ADAPTED[size], EXPERT_ADAPTERS)}
    task = {"cases": {}, "stepped": balanced, "adapted": adapted, "folder": str(tmp_path)}
    of_ranks = run_ranks("tests.training.parallel.laid_out:compare", task, size, WAIT_S)
    assert of_ranks == {name: [] for name in (*balanced, *(f"adapters under {layout}" for layout in ADAPTED[size]))}


def test_an_expert_axis_that_divides_no_devices_is_refused_in_one_line() -> None:
    assert ParallelLayout(expert=4, tensor=2).resolve(4).data == 2
    with pytest.raises(UserError, match=r"expert=3 .*4 devices") as caught:
        ParallelLayout(expert=3).resolve(4)
    assert "\n" not in str(caught.value)


def test_an_expert_axis_that_does_not_fit_the_model_is_refused_in_one_line(
    mixture: str, tiny_models: dict[str, Path]
) -> None:
    assert [len(experts_of(layer)) for layer in load_decoder(mixture).model.layers] == [1] * 4
    for experts, message in (
        (None, "is for models with experts"),
        (6, "6 experts, which expert=4"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            check_experts(experts, 4)
        assert "\n" not in str(caught.value)


@pytest.mark.soak
def test_a_killed_run_goes_on_the_same_with_four_ranks_of_experts_and_then_without(
    mixture: str, tmp_path: Path
) -> None:
    shop = Workshop(tmp_path, Path(mixture), write_jsonl(tmp_path / "train.jsonl", sums(64)))
    sections = merged(
        EVERY_STEP, {"flow": "grpo", "trainer": {"steps": 6, "keep_checkpoints": 9, "balance": {"z": 0.1}}}
    )
    whole, killed = shop.run("whole", **sections), tmp_path / "killed"
    given: list[Any] = [shop.config_file("killed", **sections), "runtime=distributed"]
    for steps, ranks in ((1, 2), (3, 4)):
        process = braid("train", *given, f"workers={ranks}", f"trainer.layout.expert={ranks}")
        wait_for_steps(killed, steps, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        given = ["--resume", killed]
    assert steps <= len(read_metrics(killed)) < 6
    process = braid("train", *given, "runtime=eager", "workers=1", "trainer.layout.expert=1")
    _, output = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert metrics_agree(killed, whole)
    ours, theirs = (weights(run / "checkpoints" / "step-6") for run in (killed, whole))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-7)
