"""Runs with `device=cuda` on a machine without CUDA; `test_without_cuda.py` starts pytest on this file with
`device.cpp` preloaded.

A tensor on the wrong device, or an operation that CUDA lacks, ends a run. Places where the host waits, and places that
use float64, are compared with `allowed.py` after each run.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

gc.disable()  # As in `conftest.py`, which is not loaded here because it would take a sixth of the time.

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoConfig

from braidrl.cluster.world import Ranks
from braidrl.config import load_config
from braidrl.engines.embedded import embedded_engine
from braidrl.engines.embedded.embedded_engine import SlotStates
from braidrl.engines.embedded.native_decoder import NativeDecoder
from braidrl.errors import UserError
from braidrl.flow.recipes import RECIPES
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.streaming.weights import side_stream
from braidrl.training.acceptance import OPTIONAL, all_findings
from braidrl.training.backends import BackendSpec
from braidrl.training.compute import cuda_layers as layers
from braidrl.training.compute import log_probs, slots
from braidrl.training.compute.cuda_layers import LayerKernels, rms_norm, rotary, silu_gate
from braidrl.training.compute.log_probs import ChunkKernels, chunk_gradient, chunk_statistics
from braidrl.training.decoders.body import PACKED
from braidrl.training.decoders.proof import Twin
from braidrl.training.memory.offload import OffloadableTensors
from braidrl.training.roles.worker import RoleWorker
from braidrl.weights.file import WeightWriter
from braidrl.weights.shards import empty, full_parts, occupy, storages
from tests.cuda.allowed import DOUBLES, WAITS
from tests.cuda.step_kernels import PlainKernels
from tests.cuda.twin import CudaTwin, cuda_twin
from tests.cuda.variants import VARIANTS
from tests.recipes.test_training import SETTINGS, placed
from tests.recipes.tiny import make_config, write_everything

LATER = ("dr_grpo", "grpo", "maxrl", "ppo", "ppo_ptx", "reinforce_plus_plus", "rloo")
"""Recipes with the same device operations as others here; they run only as soak tests."""
SEEN: dict[str, set[str]] = {"waits": set(), "doubles": set()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_everything(tmp_path_factory.mktemp("recipes"), layers=1)


@pytest.fixture
def twin() -> Iterator[CudaTwin]:
    with cuda_twin() as twin:
        yield twin


def check_places(twin: CudaTwin) -> None:
    """Fail for a place that is not listed."""
    SEEN["waits"] |= twin.waits.keys()
    SEEN["doubles"] |= twin.doubles.keys()
    waits = {place: how for place, how in twin.waits.items() if place not in WAITS}
    assert not waits, f"the host waits for the device: {waits}"
    doubles = {place: how for place, how in twin.doubles.items() if place not in DOUBLES}
    assert not doubles, f"numbers become float64: {doubles}"


def run(folder: Path, output: Path, flow: str = "grpo", **changes: Any) -> dict[str, Any]:
    """Train one step by default; return the last line of metrics."""
    usual = {
        "device": "cuda",
        "dtype": "bfloat16",
        "output": str(output),
        "trainer__steps": 1,
        "trainer__prompts_per_step": 2,
        "rollout__max_response_tokens": 2,
        "rollout__compile": False,
        "trainer__checkpoint_async": True,
        "reward__processes": 0,
    }
    return read_metrics(train(make_config(folder, flow, **{**usual, **placed(folder, changes)})))[-1]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.soak if n in LATER else ()) for n in RECIPES])
def test_every_recipe_trains(name: str, folder: Path, tmp_path: Path, twin: CudaTwin) -> None:
    changes = {key: value for key, value in SETTINGS.get(name, {}).items() if key != "trainer__rows_per_update"}
    metrics = run(folder, tmp_path, name, **changes)
    assert metrics["tokens/trained"] > 0
    updated = [
        name.removeprefix("utilisation/operations/")
        for name in metrics
        if name.endswith(".update") and "operations" in name
    ]
    assert updated and all(metrics[f"utilisation/operations/{stage}"] > 0 for stage in updated)
    assert all(metrics[f"memory/{stage}/allocated_max"] == 3 << 20 for stage in updated)
    check_places(twin)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_with_its_settings_trains(name: str, folder: Path, tmp_path: Path, twin: CudaTwin) -> None:
    metrics = run(folder, tmp_path, **VARIANTS[name])
    gap = metrics["train/rollout_log_prob_gap"]
    assert gap is None or gap < 0.05, "the engine's log-probs equal those of training"
    check_places(twin)


def test_numbers_are_those_of_the_cpu(folder: Path, tmp_path: Path, twin: CudaTwin) -> None:
    settings = {"dtype": "float32", "trainer__compile": False, "algorithm": {"old": "recompute"}}
    there = run(folder, tmp_path, **settings, name="cuda")
    here = run(folder, tmp_path, **settings, name="cpu", device="cpu")
    for key in ("loss/actor", "actor/grad_norm", "actor/entropy", "reward/mean", "actor/kl_old"):
        assert there[key] == pytest.approx(here[key], rel=1e-4, abs=1e-6), key


def test_fused_layers_match_torch(
    folder: Path, tmp_path: Path, twin: CudaTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions before compilation: Triton needs the device itself."""
    settings = {"dtype": "float32", "algorithm": {"old": "recompute"}}
    plain = run(folder, tmp_path, **settings, name="plain")
    called: set[str] = set()

    def counted(function: Any) -> Any:
        def compute(*given: Tensor) -> Any:
            called.add(function.__name__)
            return function(*given)

        return compute

    kernels = LayerKernels("cuda", *map(counted, (rms_norm, silu_gate, rotary)))
    monkeypatch.setattr(layers, "layer_kernels", lambda: kernels)
    monkeypatch.setattr(log_probs, "chunk_kernels", lambda *_: ChunkKernels(chunk_statistics, chunk_gradient))
    monkeypatch.setattr(embedded_engine, "cuda_decoder", lambda model: NativeDecoder(model, PlainKernels()))
    fused = run(folder, tmp_path, **settings, name="fused")
    for key in ("loss/actor", "actor/grad_norm", "actor/entropy", "reward/mean", "train/rollout_log_prob_gap"):
        assert fused[key] == pytest.approx(plain[key], rel=1e-4, abs=1e-6), key
    assert called == {"rms_norm", "silu_gate", "rotary"}
    check_places(twin)


def launches_of_a_layer(tmp_path: Path, kernels: bool) -> dict[str, dict[str, int]]:
    """Return the launches of one layer in a recorded decode step, and in the forward pass of an update."""
    counts: dict[str, list[Counter[str]]] = {"decode": [], "forward": []}

    def counting(name: str, function: Any, twin: CudaTwin) -> Any:
        def compute(*given: Any, **named: Any) -> Any:
            twin.launches = launches = Counter()
            try:
                return function(*given, **named)
            finally:
                twin.launches = None
                counts[name].append(launches)

        return compute

    for layers_of_model in (1, 2):
        folder = write_everything(tmp_path / str(layers_of_model), layers=layers_of_model)
        with cuda_twin() as twin, pytest.MonkeyPatch.context() as patches:
            patches.setattr(slots, "scaled_dot_product_attention", twin.kernel(slots.scaled_dot_product_attention))
            fused = LayerKernels("cuda", *map(twin.kernel, (rms_norm, silu_gate, rotary))) if kernels else None
            patches.setattr(layers, "layer_kernels", lambda fused=fused: fused)
            if kernels:
                patches.setattr(
                    embedded_engine, "cuda_decoder", lambda model: NativeDecoder(model, counted_kernels(twin))
                )
            patches.setattr(torch.cuda, "graph", counted_graph(torch.cuda.graph, twin, counts["decode"]))
            patches.setattr(RoleWorker, "hidden_states", counting("forward", RoleWorker.hidden_states, twin))
            run(folder, tmp_path / f"run{layers_of_model}", rollout__compile=True)
    steps = {name: (of_both[0], of_both[len(of_both) // 2]) for name, of_both in counts.items()}
    return {name: dict(two - one) for name, (one, two) in steps.items()}


def counted_kernels(twin: CudaTwin) -> PlainKernels:
    """Return the kernels of a decode step, each counted as one launch."""
    kernels = PlainKernels()
    for name in ("add_norm", "gated", "attend"):
        setattr(kernels, name, twin.kernel(getattr(kernels, name)))
    return kernels


def counted_graph(graph: Any, twin: CudaTwin, counts: list[Counter[str]]) -> Any:
    """Return `torch.cuda.graph` that counts the launches of what it records."""

    @contextmanager
    def recorded(*given: Any, **named: Any) -> Iterator[None]:
        with graph(*given, **named):
            twin.launches = launches = Counter()
            yield
        twin.launches = None
        counts.append(launches)

    return recorded


@pytest.mark.parametrize(("kernels", "decode", "forward"), [(False, 56, 57), (True, 8, 19)])
def test_launches_of_a_layer(kernels: bool, decode: int, forward: int, tmp_path: Path) -> None:
    """Qwen3 on CUDA.

    A fused decode step has four products, two norms with their sums, the gate, and attention with all before it; a
    forward pass seven products, four norms, two sums, rotation, gate, attention and three paddings of heads.
    """
    launches = launches_of_a_layer(tmp_path, kernels)
    print(kernels, {name: (sum(counts.values()), counts) for name, counts in launches.items()})
    assert sum(launches["decode"].values()) <= decode
    assert sum(launches["forward"].values()) <= forward


def test_a_run_resumes_from_a_checkpoint(folder: Path, tmp_path: Path, twin: CudaTwin) -> None:
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "output": str(tmp_path),
        "rollout__compile": False,
        "name": "run",
        "trainer__checkpoint_async": True,
        "trainer__prompts_per_step": 2,
    }
    first = train(make_config(folder, "grpo", **settings, trainer__steps=1))
    with TrainingRun(make_config(folder, "grpo", **settings, trainer__steps=2), resume=first) as resumed:
        resumed.train()
    assert [line["step"] for line in read_metrics(first)] == [1, 2]
    known = load_config(first / "config.yaml")
    assert known.trainer.max_tokens_per_device == 8192, "the rows of a step, in thousands"
    check_places(twin)


def test_the_type_by_default_is_bfloat16_with_masters_of_float32(
    folder: Path, tmp_path: Path, twin: CudaTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(folder, "grpo", device="cuda", output=str(tmp_path))
    worker = RoleWorker(BackendSpec("actor", config, train=True))
    assert worker.optimizer is not None
    assert {p.dtype for p in worker.model.parameters()} == {torch.bfloat16}
    assert {m.dtype for m in worker.optimizer.masters} == {torch.float32} and worker.optimizer.masters[0].is_cuda
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "V100")
    assert RoleWorker(BackendSpec("actor", config, train=True)).dtype == torch.float32
    with pytest.raises(UserError, match=r"dtype=bfloat16: V100 .*; write dtype=float32"):
        run(folder, tmp_path)


def test_roles_take_turns_on_the_device(folder: Path, tmp_path: Path, twin: CudaTwin) -> None:
    roles = {"reward": {"model": "scorer"}, "critic": {"model": "scorer"}}
    metrics = run(folder, tmp_path, "ppo", roles=roles, trainer__resident_gib=9e-4)
    assert metrics["tokens/trained"] > 0
    check_places(twin)


def test_offload_frees_device_memory_without_host_sync(twin: CudaTwin) -> None:
    tensor = torch.arange(256.0).to("cuda")
    tensors, size = OffloadableTensors(lambda: [tensor]), tensor.untyped_storage().nbytes()
    tensors.offload()
    assert tensor.untyped_storage().nbytes() == 0 and tensors.away_bytes == size
    tensors.onload()
    assert tensor.untyped_storage().nbytes() == size and not twin.waits
    (storage,) = storages([tensor])
    empty(storage)
    occupy(storage, size)
    assert tensor.untyped_storage().nbytes() == size


def test_weight_update_uses_its_own_cuda_stream(twin: CudaTwin) -> None:
    weight = torch.arange(256.0).view(16, 16)
    there = weight.to("cuda")
    parts = full_parts([("a", there), ("b", there[:, 8:])])
    writer = WeightWriter(parts, Ranks())
    with side_stream(there.device):
        file = writer.write(parts)
    came = dict(file.tensors())
    assert torch.equal(came["a"], weight) and torch.equal(came["b"], weight[:, 8:])
    # The writer thread waits for its copies into the file.
    assert twin.waits.keys() <= {"weights/transfer.py:WeightTransfer._copy_here"}


def test_a_tensor_on_the_wrong_device_is_found(
    folder: Path, tmp_path: Path, twin: CudaTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_the_host(*keys: Any) -> Tensor:
        return torch.full((16,), 0.5, dtype=torch.float64)

    monkeypatch.setattr(embedded_engine, "uniform", on_the_host)
    with pytest.raises(RuntimeError, match="found at least two devices"):
        run(folder, tmp_path)


def waiting(step: Any) -> Any:
    """Run a decode step that needs a number of its own for each row."""

    def advance(self: Any, *drawn: Tensor) -> Tensor:
        assert self.drawn.sum().item() >= 0
        result: Tensor = step(self, *drawn)
        return result

    return advance


def test_a_number_that_the_decode_loop_asks_for_is_found(
    folder: Path, tmp_path: Path, twin: CudaTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotStates, "advance", waiting(SlotStates.advance))
    run(folder, tmp_path)
    with pytest.raises(AssertionError, match=r"the host waits.*embedded_engine\.py:EmbeddedEngine\._decode"):
        check_places(twin)


def test_a_recorded_step_cannot_wait(twin: CudaTwin) -> None:
    number = torch.ones(3).to("cuda")
    with (
        pytest.raises(RuntimeError, match=r"graph .* being recorded"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        float(number.sum())


def test_a_constant_of_float64_is_found(
    folder: Path, tmp_path: Path, twin: CudaTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = log_probs.Vocabulary.scaled

    def scaled(self: log_probs.Vocabulary, logits: Tensor, temperature: float) -> Tensor:
        return plain(self, logits, temperature) * torch.ones(1, dtype=torch.float64, device=logits.device)

    monkeypatch.setattr(log_probs.Vocabulary, "scaled", scaled)
    with pytest.raises(RuntimeError, match="dtype"):
        run(folder, tmp_path, "sft", rollout__samples_per_prompt=1)
    with pytest.raises(AssertionError, match=r"become float64.*log_probs\.py"):
        check_places(twin)


def test_a_dtype_that_cuda_has_no_kernel_for_is_found(twin: CudaTwin) -> None:
    states_of = torch.ones(4, 2, 16).to("cuda")
    offsets = torch.tensor([0, 4], dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match=r"takes half precision, not torch\.float32"):
        torch.nn.attention.varlen.varlen_attn(states_of, states_of, states_of, offsets, offsets, 4, 4)


def test_every_allowed_place_occurs_in_a_run() -> None:
    """Check, as the last test, that every allowed place was needed by a run."""
    assert set(WAITS) - SEEN["waits"] == set()
    assert set(DOUBLES) - SEEN["doubles"] == set()


def test_the_device_is_torchs_own_fake_one() -> None:
    with FakeTensorMode():
        tensor = torch.empty(2, device="cuda", requires_grad=True)
        tensor.sum().backward()
        assert isinstance(tensor.grad, FakeTensor) and tensor.grad.is_cuda


def test_the_proof_of_a_decoder_runs_on_the_device(twin: CudaTwin) -> None:
    """Kernels of linear attention compute only there, so the proof must not leave a tensor on the CPU."""
    proven = Twin(AutoConfig.for_model("qwen3"), device="cuda")
    plan, findings = all_findings(proven)
    assert plan == PACKED
    assert [finding for finding in findings if not finding.holds and finding.name not in OPTIONAL] == []
