"""LoRA: the adapters' gradients, their merged weights, and their checkpoints."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import Ranks
from braidrl.config import Config, LoraConfig
from braidrl.config.layout import ParallelLayout
from braidrl.errors import UserError
from braidrl.observe.metrics import Sums
from braidrl.training.backend_contract import CHECKS, BackendUnderTest
from braidrl.training.backends import BackendSpec
from braidrl.training.lora import ADAPTER, adapter_config
from braidrl.training.memory.footprint import model_shape, resident_bytes
from braidrl.training.objective import Objective, denominators
from braidrl.training.roles.copies import RoleCopy
from braidrl.training.roles.worker import RoleWorker
from braidrl.weights.collective import Incoming, WeightOffer
from braidrl.weights.file import WeightWriter
from braidrl.weights.transfer import LayoutCopy
from tests.training.decoders.families import write_family
from tests.training.parallel.laid_out import EXPERT_ADAPTERS, JETMOE_ADAPTERS, OBJECTIVE, config_of, make_rows, one_step

LORA = {"rank": 4, "alpha": 6.0}


def adapted(model: Path, dtype: str = "float64", layout: dict[str, Any] | None = None, **lora: Any) -> Config:
    config = config_of(str(model), layout, dtype)
    trainer = config.trainer.model_copy(update={"lora": LoraConfig(**{**LORA, **lora}), "learning_rate": 1e-2})
    return config.model_copy(update={"trainer": trainer})


def started(config: Config, steps: int = 1) -> RoleWorker:
    """Return a worker with non-zero adapters."""
    worker = RoleWorker(BackendSpec("actor", config, train=True))
    for iteration in range(1, steps + 1):
        one_step(worker, torch.arange(len(make_rows())), iteration)
    return worker


def gradients(worker: RoleWorker) -> dict[str, torch.Tensor]:
    """Return the gradients of the loss sum over all rows, by parameter."""
    assert worker.optimizer is not None
    worker.forward_backward(Objective.of("actor", OBJECTIVE), make_rows(), Sums())
    names = {id(p): name for name, p in worker.model.named_parameters()}
    result = zip(worker.optimizer.parameters, worker.optimizer.sums.pop("tokens"), strict=True)
    return {names[id(p)]: gradient for p, gradient in result if gradient is not None}


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_gradients_are_the_chain_rule_on_the_merged_weights_gradient(
    tiny_models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Check dL/dA = α/r · Bᵀ dL/dW and dL/dB = α/r · dL/dW Aᵀ, with dL/dW of a plain model that has the merged
    weights.
    """
    worker = started(adapted(tiny_models[name]))
    worker.export(tmp_path / "merged")
    plain = RoleWorker(BackendSpec("actor", config_of(str(tmp_path / "merged")), train=True))
    of_weights, of_adapters = gradients(plain), gradients(worker)
    tensors, scaling = dict(worker.model.named_parameters()), LORA["alpha"] / LORA["rank"]
    layers = [n.removesuffix(".lora_A.default.weight") for n in of_adapters if n.endswith("lora_A.default.weight")]
    assert len(layers) == 2 * 7 and len(of_adapters) == 2 * len(layers), "only adapters have a gradient"
    for layer in layers:
        down, up, of_weight = (
            tensors[f"{layer}.lora_A.default.weight"],
            tensors[f"{layer}.lora_B.default.weight"],
            of_weights[f"{layer}.weight"],
        )
        assert up.abs().max() > 0
        result = of_adapters[f"{layer}.lora_A.default.weight"], of_adapters[f"{layer}.lora_B.default.weight"]
        torch.testing.assert_close(result[0], scaling * up.T @ of_weight, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(result[1], scaling * of_weight @ down.T, rtol=1e-9, atol=1e-9)


def test_export_is_an_equal_plain_model_and_peft_loads_the_adapters(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    from peft import PeftModel  # Imported here: it takes two seconds.

    config, rows = adapted(tiny_models["qwen2"]), make_rows()
    worker = started(config, steps=2)
    worker.export(tmp_path)
    source = AutoModelForCausalLM.from_pretrained(tiny_models["qwen2"], dtype=torch.float64)
    merged = RoleWorker(BackendSpec("reference", config_of(str(tmp_path)), train=False))
    assert merged.model.state_dict().keys() == source.state_dict().keys()
    expected = worker.forward("log_probs", rows).values
    torch.testing.assert_close(merged.forward("log_probs", rows).values, expected, rtol=0, atol=1e-9)
    assert not torch.allclose(
        RoleWorker(BackendSpec("reference", config_of(str(tiny_models["qwen2"])), train=False))
        .forward("log_probs", rows)
        .values,
        expected,
    )
    by_peft = PeftModel.from_pretrained(source, str(tmp_path / ADAPTER)).double().merge_and_unload()
    for name, tensor in merged.model.state_dict().items():
        torch.testing.assert_close(by_peft.state_dict()[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3_moe", EXPERT_ADAPTERS),
        pytest.param("llama4_text", EXPERT_ADAPTERS, marks=pytest.mark.soak),
        ("jetmoe", JETMOE_ADAPTERS),
    ],
)
def test_adapters_of_experts_have_the_chain_rules_gradient_and_peft_reads_them(
    tmp_path: Path, name: str, targets: tuple[str, ...]
) -> None:
    from peft import PeftModel

    write_family(tmp_path / "mixture", name)
    config = adapted(tmp_path / "mixture", targets=targets)
    worker = started(config)
    worker.export(tmp_path / "merged")
    plain = RoleWorker(BackendSpec("actor", config_of(str(tmp_path / "merged")), train=True))
    expected = worker.forward("log_probs", make_rows()).values
    torch.testing.assert_close(plain.forward("log_probs", make_rows()).values, expected, rtol=0, atol=1e-9)
    of_weights, of_adapters = gradients(plain), gradients(worker)
    tensors, scaling = dict(worker.model.named_parameters()), LORA["alpha"] / LORA["rank"]
    stacks = [name for name in of_weights if name.endswith(targets[1:])]
    assert stacks and all(of_weights[stack].dim() == 3 for stack in stacks)
    assert all(".lora_" in name for name in of_adapters), "only adapters have a gradient"
    for stack in stacks:
        module, _, leaf = stack.rpartition(".")
        down, up = tensors[f"{module}.lora_A.{leaf}"], tensors[f"{module}.lora_B.{leaf}"]
        assert up.abs().max() > 0
        result = of_adapters[f"{module}.lora_A.{leaf}"], of_adapters[f"{module}.lora_B.{leaf}"]
        torch.testing.assert_close(result[0], scaling * up.mT @ of_weights[stack], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(result[1], scaling * of_weights[stack] @ down.mT, rtol=1e-9, atol=1e-9)
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "mixture", dtype=torch.float64)
    by_peft = PeftModel.from_pretrained(source, str(tmp_path / "merged" / ADAPTER)).double().merge_and_unload()
    for key, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(by_peft.state_dict()[key], tensor, rtol=0, atol=1e-12)
    # Another run starts from peft's files.
    start = config_of(str(tmp_path / "mixture")).trainer.model_copy(
        update={"lora": LoraConfig(adapter=tmp_path / "merged" / ADAPTER)}
    )
    again = RoleWorker(BackendSpec("actor", config.model_copy(update={"trainer": start}), train=True))
    assert torch.equal(again.forward("log_probs", make_rows()).values, expected)


def test_only_adapters_have_masters_and_moments(tiny_models: dict[str, Path]) -> None:
    worker = started(adapted(tiny_models["qwen3"], "bfloat16"))
    assert worker.optimizer is not None
    assert worker.model.dtype == torch.bfloat16 and worker.model.base_model.rotary_emb.inv_freq.dtype == torch.float32
    assert all(master.dtype == torch.float32 for master in worker.optimizer.masters)
    # A layer's adapter has rank · (in + out) numbers: attention 32 wide with 16 for keys and values, MLP 48.
    per_layer = 4 * ((32 + 32) * 2 + (32 + 16) * 2 + (32 + 48) * 3)
    assert sum(master.numel() for master in worker.optimizer.masters) == 2 * per_layer
    shape = model_shape(tiny_models["qwen3"], torch.bfloat16, lora=LoraConfig(**LORA))
    result = resident_bytes(shape, trained=True)
    assert result["AdamW moments"] == 2 * result["master weights"] == 2 * 4 * 2 * per_layer
    assert result["weights"] == 2 * sum(p.numel() for p in worker.model.parameters())


def test_every_process_begins_with_the_same_adapters(tiny_models: dict[str, Path]) -> None:
    first = started(adapted(tiny_models["qwen3"]), steps=0)
    torch.rand(3)
    second = started(adapted(tiny_models["qwen3"]), steps=0)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("check", CHECKS)
def test_a_worker_with_adapters_keeps_the_contract_of_training_backends(
    check: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config, rows = adapted(tiny_models["llama"]), make_rows()
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


def test_checkpoints_of_other_kinds_are_refused_before_anything_changes(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model = tiny_models["qwen3"]
    started(adapted(model)).export(tmp_path / "adapted")
    whole = RoleWorker(BackendSpec("actor", config_of(str(model)), train=True))
    whole.export(tmp_path / "whole")
    cases = [
        (whole, "adapted", "was trained with trainer.lora"),
        (started(adapted(model), steps=0), "whole", "was trained without trainer.lora"),
        (started(adapted(model, rank=2), steps=0), "adapted", "holds another model"),
    ]
    for worker, folder, message in cases:
        before = [p.detach().clone() for p in worker.model.parameters()]
        with pytest.raises(UserError, match=message) as caught:
            worker.load(tmp_path / folder)
        assert "\n" not in str(caught.value)
        assert all(torch.equal(p, q) for p, q in zip(worker.model.parameters(), before, strict=True))


def test_a_critics_head_is_trained_beside_its_adapters(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config = adapted(tiny_models["qwen2"])
    worker, again = (RoleWorker(BackendSpec("critic", config, train=True, is_scalar=True)) for _ in range(2))
    assert worker.optimizer is not None
    head = worker.model.score.weight
    assert any(p is head for p in worker.optimizer.parameters) and not worker.model.base_model.norm.weight.requires_grad
    with torch.no_grad():
        head.fill_(0.5)
    worker.export(tmp_path)
    again.load(tmp_path)
    assert torch.equal(again.model.score.weight, head)
    scorer = RoleWorker(BackendSpec("reward", config_of(str(tmp_path)), train=False, is_scalar=True))
    torch.testing.assert_close(
        scorer.forward("scores", make_rows()).values, worker.forward("scores", make_rows()).values, rtol=0, atol=1e-9
    )


def test_a_copied_reference_takes_the_merged_weights(tiny_models: dict[str, Path]) -> None:
    worker = started(adapted(tiny_models["qwen2"]))
    reference = RoleWorker(BackendSpec("reference", config_of(str(tiny_models["qwen2"])), train=False))
    RoleCopy(reference, worker).move(0.0)
    for name, tensor in worker.full_state_dict().items():
        assert torch.equal(reference.model.state_dict()[name], tensor), name


@pytest.mark.parametrize("way", ["in place", "collective", "file", "for vLLM"])
def test_publishing_only_adapters_moves_only_their_bytes(tiny_models: dict[str, Path], way: str) -> None:
    from peft import PeftModel

    trained = started(adapted(tiny_models["qwen3"]))
    other = RoleWorker(BackendSpec("actor", adapted(tiny_models["qwen3"]), train=True))
    parts, own = (worker.weights(adapters_alone=True) for worker in (trained, other))
    moved = LayoutCopy(lambda: parts, lambda: own, Ranks()).refresh().stayed if way == "in place" else 0
    if way == "collective":
        offer = WeightOffer(Ranks(), "127.0.0.1", 60.0, torch.device("cpu"))
        with closing(offer), offer.keep(1, parts).request(1) as notice:
            moved = Incoming(notice, 0, torch.device("cpu")).put_into(own).received
    elif way == "file":
        writer = WeightWriter(parts, Ranks())
        with closing(writer.write(parts)) as file:
            file.put_into(own)
        moved = writer.transfer.traffic.stayed
    elif way == "for vLLM":
        assert trained.lora is not None
        writer = WeightWriter(parts, Ranks(), adapter=adapter_config(trained.lora))
        with closing(writer.write(parts)) as file:
            assert file.is_adapter
            base = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"], dtype=trained.dtype)
            read = PeftModel.from_pretrained(base, file.folder).merge_and_unload().state_dict()
        moved = writer.transfer.traffic.stayed
    expected, tensors = trained.full_state_dict(), other.full_state_dict() if way != "for vLLM" else read
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, atol=1e-12 if way == "for vLLM" else 0, rtol=0)
    adapters = sum(p.nbytes for p in trained.model.parameters() if p.requires_grad)
    assert moved == adapters < 0.5 * sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "ranks", "layouts"),
    [
        ("qwen3", 2, [{"tensor": 2}, {"shard": "full"}, {"pipeline": 2}]),
        pytest.param("qwen3", 2, [{"sequence": 2, "shard": "optimizer"}], marks=pytest.mark.soak),
        pytest.param(
            "qwen2", 4, [{"tensor": 2, "shard": "full"}, {"pipeline": 2, "tensor": 2}], marks=pytest.mark.soak
        ),
    ],
)
def test_ranks_that_shard_the_model_train_the_same_adapters(
    name: str, ranks: int, layouts: list[dict[str, Any]], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model = tiny_models[name]
    started(adapted(model)).export(tmp_path / "alone")
    task = {"model": str(model), "layouts": layouts, "folder": str(tmp_path)}
    of_ranks = run_ranks("tests.training.parallel.laid_out:with_adapters", task, ranks, 200.0)
    assert of_ranks == {str(layout): [] for layout in layouts}


def test_adapters_are_sharded_with_their_matrices(tiny_models: dict[str, Path]) -> None:
    shape = model_shape(tiny_models["qwen3"], torch.float64, lora=LoraConfig(**LORA))
    whole, half = (resident_bytes(shape, True, ParallelLayout(data=1, tensor=n))["gradients"] for n in (1, 2))
    # Of q, k, v, gate and up the first factor is whole, (4, 32) of each; of o and down the second one, (32, 4).
    assert half == (whole + 2 * 7 * 4 * 32 * 8) / 2
