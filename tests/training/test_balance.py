"""The experts of a mixture are balanced by losses, by a selection bias, or not at all, whatever the packing."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from braidrl.config import BalanceConfig
from braidrl.errors import UserError
from braidrl.observe.metrics import Sums
from braidrl.training.backends import BackendSpec
from braidrl.training.balance import RouterBalance, auxiliary_loss, row_shares, z_loss
from braidrl.training.decoders.routing import routers_of
from braidrl.training.objective import Objective, denominators
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.roles.worker import RoleWorker
from tests.tiny import MIXTURE, TOKENIZER
from tests.training.parallel.laid_out import config_of, make_rows

OBJECTIVE = Objective.of("actor", {"loss": "sft", "aggregate": "token-mean"})
SIZES: dict[str, Any] = {
    **{name: getattr(MIXTURE, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps")},
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}
CONFIGS = {
    "qwen3_moe": MIXTURE,
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=0,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return folders of mixtures whose routers prefer two experts for every token."""
    folder = tmp_path_factory.mktemp("mixtures")
    for name, config in CONFIGS.items():
        torch.manual_seed(3)
        model: Any = AutoModelForCausalLM.from_config(deepcopy(config))
        with torch.no_grad():
            model.model.embed_tokens.weight += 0.5
            for parameter in (p for key, p in model.named_parameters() if key.endswith("gate.weight")):
                parameter.mul_(0.5)[:2] += 0.3
        model.save_pretrained(folder / name)
        TOKENIZER.save_pretrained(folder / name)
    return {name: str(folder / name) for name in CONFIGS}


def make_worker(model: str, balance: dict[str, Any], **more: Any) -> RoleWorker:
    config = config_of(model, balance=balance, **{"max_grad_norm": None, "learning_rate": 3e-3, **more})
    return RoleWorker(BackendSpec("actor", config, train=True))


def step(worker: RoleWorker, number: int = 1) -> tuple[dict[str, float], dict[str, float]]:
    """Make an optimizer step; return metrics per token and those of the step."""
    rows, sums = make_rows(), Sums()
    worker.forward_backward(OBJECTIVE, rows, sums)
    worker.optim_step({"tokens": denominators(rows)["tokens"]}, number)
    return sums.means(), worker.step_metrics


@pytest.mark.parametrize("of", ["row", "batch"])
def test_the_auxiliary_loss_equals_a_plain_loop(of: str) -> None:
    torch.manual_seed(0)
    scores, offsets = torch.randn(9, 2, 4, dtype=torch.float64).softmax(-1), torch.tensor([0, 5, 5, 9])
    routes = scores.topk(2).indices
    expected = torch.zeros(9, dtype=torch.float64)
    last = torch.rand(1, 2, 4, dtype=torch.float64)  # shares of the last step's whole batch
    for start, end in ((0, 5), (5, 9)):
        for layer in range(2):
            for expert in range(4):
                of_row = float((routes[start:end, layer] == expert).sum()) / (2 * (end - start))
                share = of_row if of == "row" else float(last[0, layer, expert])
                expected[start:end] += 4 * share * scores[start:end, layer, expert]
    shares = row_shares(routes, 4, offsets) if of == "row" else last
    torch.testing.assert_close(auxiliary_loss(scores, shares), expected)
    logits = scores.log()
    torch.testing.assert_close(z_loss(logits + 2), torch.full((9,), 8.0, dtype=torch.float64))


def test_shares_of_the_last_batch_balance_any_packing_and_are_resumed(models: dict[str, str], tmp_path: Path) -> None:
    balance = {"auxiliary": 0.5, "shares": "batch"}
    workers = [make_worker(models["qwen3_moe"], balance, max_tokens_per_device=size) for size in (64, 4096)]
    (first, _), _ = (step(worker) for worker in workers)
    assert first["actor/router_auxiliary"] == pytest.approx(4.0), "equal shares at first: 1 for each layer"
    workers[0].export(tmp_path / "saved")
    again = make_worker(models["qwen3_moe"], balance)
    again.load(tmp_path / "saved")
    second = [step(worker, 2) for worker in (*workers, again)]
    assert second[2] == second[0] and second[1][0] == pytest.approx(second[0][0], rel=1e-5)
    assert second[0][0]["actor/router_auxiliary"] > 4.5, "the experts that the last batch chose have higher scores"


def test_balance_losses_have_the_same_gradient_in_any_packing(models: dict[str, str]) -> None:
    result = []
    for more in (
        {},
        {"max_tokens_per_device": 4096},
        {"max_tokens_per_device": 4096, "activation_checkpointing": True},
    ):
        worker = make_worker(models["qwen3_moe"], {"auxiliary": 0.5, "z": 0.1}, **more)
        metrics, loads = step(worker)
        result.append((metrics | loads, worker.full_state_dict()))
    plain = make_worker(models["qwen3_moe"], {})
    step(plain)
    for metrics, weights in result[1:]:
        assert metrics == pytest.approx(result[0][0], rel=1e-5)
        # Routers compute scores in float32.
        assert all(torch.allclose(weights[name], tensor, atol=2e-5) for name, tensor in result[0][1].items())
    routers = {name: tensor for name, tensor in plain.full_state_dict().items() if name.endswith("gate.weight")}
    assert all(float((result[0][1][name] - tensor).abs().max()) > 1e-3 for name, tensor in routers.items())


def test_frozen_routers_stay_and_the_rest_trains(models: dict[str, str]) -> None:
    worker = make_worker(models["qwen3_moe"], {"frozen": True})
    before = {name: tensor.clone() for name, tensor in worker.full_state_dict().items()}
    step(worker)
    same = {name for name, tensor in worker.full_state_dict().items() if torch.equal(tensor, before[name])}
    assert same == {f"model.layers.{layer}.mlp.gate.weight" for layer in range(4)}


def test_a_selection_bias_follows_the_loads_and_is_resumed(models: dict[str, str], tmp_path: Path) -> None:
    worker = make_worker(models["deepseek_v3"], {"bias": 0.02})
    _, loads = step(worker)
    (first, _), biases = loads.values(), [router.e_score_correction_bias for router in routers_of(worker.model)]
    assert first == pytest.approx(4.0, rel=0.1), "both experts of every token are the same two"
    worker.forward_backward(OBJECTIVE, make_rows(), Sums())
    assert worker.balance is not None
    tokens = float(make_rows()["action_tokens"].sum())
    assert worker.balance.counts.sum(-1).tolist() == [2 * tokens] * 2, "neither prompts nor filler are counted"
    worker.optim_step({"tokens": 0.0}, 1)
    assert biases[0].tolist() == pytest.approx([-0.02] * 2 + [0.02] * 6)
    worker.export(tmp_path / "saved")
    other = make_worker(models["deepseek_v3"], {"bias": 0.02})
    other.load(tmp_path / "saved")
    for router, bias in zip(routers_of(other.model), biases, strict=True):
        assert torch.equal(router.e_score_correction_bias, bias)
    assert step(other, 2) == step(worker, 2)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "balance", "most"),
    [
        ("qwen3_moe", {"frozen": True}, 4.0),
        ("qwen3_moe", {}, 4.0),
        ("qwen3_moe", {"z": 0.1}, 4.0),
        ("qwen3_moe", {"auxiliary": 0.1}, 2.0),
        ("qwen3_moe", {"auxiliary": 0.1, "shares": "batch"}, 2.5),
        ("deepseek_v3", {}, 4.0),
        ("deepseek_v3", {"auxiliary": 0.1}, 2.0),
        ("deepseek_v3", {"bias": 0.01}, 2.0),
    ],
)
def test_the_busiest_expert_of_a_collapsed_router_has_less_load_after_200_steps(
    models: dict[str, str], kind: str, balance: dict[str, Any], most: float
) -> None:
    worker = make_worker(models[kind], balance, max_tokens_per_device=4096, activation_checkpointing=False)
    loads = [sum(step(worker, number)[1].values()) / len(routers_of(worker.model)) for number in range(1, 201)]
    print(f"{kind} {balance}: {loads[0]:.2f} at the first step, {loads[-1]:.2f} at the last")
    # A bias takes turns at the experts, so that single steps vary.
    assert loads[0] > 3.5 and sum(loads[-20:]) / 20 <= most


def test_balance_that_a_model_cannot_have_is_refused_in_one_line(models: dict[str, str]) -> None:
    model: Any = AutoModelForCausalLM.from_config(deepcopy(MIXTURE))
    with pytest.raises(UserError, match=r"balance\.auxiliary") as caught:
        RouterBalance(model, BalanceConfig(bias=0.1), DataParallel())
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="frozen"):
        BalanceConfig(bias=0.1, frozen=True)
