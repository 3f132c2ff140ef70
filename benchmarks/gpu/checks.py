"""Correctness checks on a device. Each check returns its findings, or raises AssertionError."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks.gpu import models
from benchmarks.gpu.models import Shape
from braidrl.algorithms.random import uniform
from braidrl.cluster.process_groups import join_group
from braidrl.cluster.world import Ranks
from braidrl.engines.requests import Response
from braidrl.observe.metrics import Sums
from braidrl.training.compute import cuda_layers as kernels
from braidrl.training.compute.cuda_layers import LayerKernels, use_kernels
from braidrl.training.objective import Objective
from braidrl.weights.collective import Incoming, WeightOffer
from braidrl.weights.file import WeightFile, WeightWriter

CURVE_STEPS = 30


@dataclass(frozen=True)
class Place:
    """A small model in a folder, for the checks."""

    device: str
    folder: Path
    shape: Shape = models.SHAPES["tiny"][0]

    @property
    def model(self) -> Path:
        return models.write(self.shape, self.folder)

    @property
    def rows(self) -> Any:
        return models.random_rows(6, 40, self.shape.vocabulary)


def random_numbers(place: Place) -> dict[str, Any]:
    """Check that keys give the same random bits as on the CPU."""
    keys = torch.arange(1000)
    assert torch.equal(uniform(7, keys.to(place.device)).cpu(), uniform(7, keys))
    return {"numbers": 1000}


def float32(place: Place) -> dict[str, Any]:
    """Check that log-probs, loss and gradient in float32 equal plain torch on the CPU."""
    here, there = (
        models.worker(place.model, place.device, "float32"),
        models.worker(place.model, "cpu", "float32", compile=False),
    )
    found, wanted = here.forward("log_probs", place.rows).values, there.forward("log_probs", place.rows).values
    difference = float((found - wanted).abs().max())
    assert difference < 1e-4, difference
    (loss, norm), (loss_there, norm_there) = models.train(here, place.rows), models.train(there, place.rows)
    assert abs(loss - loss_there) < 1e-4 and abs(norm - norm_there) < 1e-3 * norm_there, (norm, norm_there)
    return {"log_probs_differ_by": difference, "norms": [norm, norm_there]}


def bfloat16(place: Place) -> dict[str, Any]:
    """Check that log-probs in bfloat16 equal float32 up to unbiased rounding."""
    wanted = models.worker(place.model, "cpu", "float32").forward("log_probs", place.rows).values
    gap = models.worker(place.model, place.device, "bfloat16").forward("log_probs", place.rows).values - wanted
    assert gap.abs().mean() < 0.02 and gap.mean().abs() < 0.005, (gap.abs().mean(), gap.mean())
    return {"mean_gap": float(gap.abs().mean()), "mean": float(gap.mean())}


def fused(place: Place) -> dict[str, Any]:
    """Check each way to fuse norms, gated activations, rotary embeddings and log-probs against torch in float32.

    On a CPU the functions are computed before they are compiled.
    """
    wanted, found = _outputs(place, None), {}
    for name, made in _ways_to_fuse(place.device).items():
        pairs = zip(_outputs(place, made), wanted, strict=True)
        found[name] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        assert found[name] < 1e-4, (name, found)
    return found


def _ways_to_fuse(device: str) -> dict[str, LayerKernels]:
    if device == "cpu":
        return {"before compiling": LayerKernels("cpu", kernels.rms_norm, kernels.silu_gate, kernels.rotary)}
    return {
        kind: kernels.kernels_by(kind) for kind in kernels.NOTICES if kind != "liger" or not lacking((kernels.LIGER,))
    }


def _outputs(place: Place, made: LayerKernels | None) -> list[Tensor]:
    """Return log-probs of the rows, and the sum of each parameter's gradient, with fused kernels or torch's
    operations.
    """
    role = models.worker(place.model, place.device, "float32", compile=made is not None)
    if made is not None:
        use_kernels(role.model, made)
    values = role.forward("log_probs", place.rows).values
    role.forward_backward(Objective.of("actor", {"loss": "sft", "aggregate": "token-mean"}), place.rows, Sums())
    assert role.optimizer is not None
    return [values, *(gradient for gradient in role.optimizer.collecting if gradient is not None)]


def decoding(place: Place) -> dict[str, Any]:
    """Check that fused decode steps, recorded on CUDA, sample what torch's own steps sample."""
    role = models.worker(place.model, place.device, "float32")
    asked = models.requests(24, 4, 9, 12, place.shape.vocabulary)
    one, other = (models.engine(role, 32, 64, compile).generate(asked) for compile in (True, False))
    gap = max(difference(a, b) for a, b in zip(one, other, strict=True))
    assert gap < 1e-4, gap
    return {"log_probs_differ_by": gap, "tokens": sum(len(row.tokens) for row in one)}


def difference(one: Response, other: Response) -> float:
    assert torch.equal(one.tokens, other.tokens)
    return float((one.log_probs - other.log_probs).abs().max())


def curve(place: Place) -> dict[str, Any]:
    """Check that thirty optimizer steps have the same losses as on the CPU."""
    losses: list[list[float]] = []
    for device in (place.device, "cpu"):
        role = models.worker(place.model, device, "float32", compile=device != "cpu" or place.device != "cpu")
        losses.append([models.train(role, place.rows, n + 1)[0] for n in range(CURVE_STEPS)])
    gap = max(abs(a - b) for a, b in zip(*losses, strict=True))
    assert gap < 1e-2 and losses[0][-1] < 0.9 * losses[0][0], (gap, losses[0])
    return {"first": losses[0][0], "last": losses[0][-1], "differ_by": gap}


def offload(place: Place) -> dict[str, Any]:
    """Check that weights and optimizer leave the device and come back unchanged."""
    role = models.worker(place.model, place.device, "float32")
    models.train(role, place.rows)
    before = [tensor.detach().clone() for tensor in role.model.parameters()]
    held = torch.cuda.memory_allocated() if place.device == "cuda" else 0
    for tensors in role.offloadable.values():
        tensors.offload()
    away = sum(tensors.away_bytes for tensors in role.offloadable.values())
    if place.device == "cuda":
        assert torch.cuda.memory_allocated() <= held - away
    for tensors in role.offloadable.values():
        tensors.onload()
    assert all(torch.equal(a, b) for a, b in zip(before, role.model.parameters(), strict=True))
    return {"bytes": away}


def adapters(place: Place) -> dict[str, Any]:
    """Check that the engine decodes with adapters as training applies them."""
    return _generates_what_it_trains(place, lora={"rank": 4})


def few_bits(place: Place) -> dict[str, Any]:
    """Check the same over 4-bit weights, with 8-bit moments."""
    return _generates_what_it_trains(
        place, lora={"rank": 4, "base_dtype": "nf4"}, optimizer="adamw8bit", optimizer_settings={"min_8bit_size": 0}
    )


def _generates_what_it_trains(place: Place, **trainer: Any) -> dict[str, Any]:
    role = models.worker(place.model, place.device, "float32", **trainer)
    losses = [models.train(role, place.rows, n + 1)[0] for n in range(3)]
    assert losses[-1] < losses[0], losses
    if (shared := role.shared_model) is None:
        return {"losses": losses, "engine": "has a merged copy"}
    engine = models.EmbeddedEngine(shared, models.tokenizer(), models.Decoding(16, 64))
    asked = models.requests(4, 4, 5, 8, place.shape.vocabulary)
    answers = engine.generate(asked)
    tokens = torch.stack([torch.cat([q.prompt, a.tokens]) for q, a in zip(asked, answers, strict=True)])
    found = role.forward("log_probs", models.as_rows(tokens, torch.zeros(4), 5)).values
    gap = float((found - torch.cat([a.log_probs for a in answers])).abs().max())
    assert gap < 1e-3, gap
    return {"losses": losses, "gap": gap}


def one_rank(place: Place) -> dict[str, Any]:
    """Check that a group of one rank (NCCL on CUDA) sums."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    join_group(store, 0, 1, 60.0, place.device == "cuda", "127.0.0.1")
    tensor = torch.full((3,), 2.0, device=place.device)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    assert tensor.tolist() == [2.0] * 3
    return {"backend": "nccl" if place.device == "cuda" else "gloo"}


def two_processes(place: Place) -> dict[str, Any]:
    """Check that another process on the device receives weight versions from a file and over gloo; NCCL needs two
    devices.
    """
    context = multiprocessing.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    role = models.worker(place.model, place.device, "bfloat16")
    writer = WeightWriter(role.weights(), Ranks())
    offer = WeightOffer(Ranks(), "127.0.0.1", 120.0, torch.device("cpu"))
    child = context.Process(target=sum_loaded, args=(place.device, there, back))
    child.start()
    seconds = {}
    for version, way in enumerate(("file", "file", "group", "group"), 1):
        with torch.no_grad():
            for parameter in role.model.parameters():
                parameter.mul_(version)
        parts = role.weights()
        wanted = {name: float(part.local.double().sum()) for name, part in parts.items()}
        start = time.perf_counter()
        with ExitStack() as sent:
            if way == "file":
                there.put(str(sent.enter_context(closing(writer.write(parts))).path))
            else:
                there.put(sent.enter_context(offer.keep(version, parts).request(1)))
            assert back.get(timeout=120) == wanted
        seconds[way] = time.perf_counter() - start
    there.put(None)
    child.join(60)
    assert child.exitcode == 0
    return {
        "shared": place.device,
        "tensors": len(wanted),
        "bytes": sum(p.local.nbytes for p in parts.values()),
        **seconds,
    }


def sum_loaded(device: str, there: Any, back: Any) -> None:
    """Load each version to the device in the other process, and return the sum of each of its tensors; tied ones
    once.
    """
    names: set[str] = set()
    while (source := there.get()) is not None:
        if isinstance(source, str):
            loaded = {name: part.local.to(device) for name, part in WeightFile(source).parts().items()}
            names = set(loaded)
        else:
            incoming = Incoming(source, 0, torch.device(device))
            loaded = {name: tensor.to(device) for name, tensor in incoming.tensors() if name in names}
        back.put({name: float(tensor.double().sum()) for name, tensor in loaded.items()})


CHECKS: dict[str, tuple[Callable[[Place], dict[str, Any]], tuple[str, ...]]] = {
    "random numbers": (random_numbers, ()),
    "float32": (float32, ()),
    "bfloat16": (bfloat16, ()),
    "fused kernels": (fused, ()),
    "decoding": (decoding, ()),
    "loss curve": (curve, ()),
    "offloading": (offload, ()),
    "adapters": (adapters, ("peft",)),
    "few bits": (few_bits, ("peft", "bitsandbytes")),
    "one rank": (one_rank, ()),
    "two processes": (two_processes, ()),
}
"""Checks by name, with the packages that each needs beside torch and transformers."""


def lacking(packages: tuple[str, ...]) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]
