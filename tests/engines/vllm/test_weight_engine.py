"""What vLLM's own weight transfer is told on CUDA is what the installed vLLM, and torch, take."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from braidrl.engines.vllm.weight_engine import BACKEND, calls_to_load, rebuild_arguments, update_info
from braidrl.weights.handles import LiveWeights, MappedWeights
from tests.engines.served import vllm_python

HANDLE = {
    "name": "w", "dtype": "bfloat16", "shape": [3, 4], "device": "cuda",
    "place": [0, b"memory", 2048, 512, b"counter", 7, b"event", True],
}  # fmt: skip


@pytest.fixture(scope="module")
def installed() -> Path:
    """Where vLLM's files are; it takes seconds to import."""
    python = vllm_python()
    assert python is not None
    (found,) = (python.parent.parent / "lib").glob("python*/site-packages/vllm")
    return found


def members(file: Path, name: str) -> Iterator[ast.stmt]:
    (found,) = (n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)
    yield from found.body


def test_the_message_has_the_fields_of_vllms(installed: Path) -> None:
    file = installed / "distributed" / "weight_transfer" / "ipc_engine.py"
    fields = [m for m in members(file, "IPCWeightTransferUpdateInfo") if isinstance(m, ast.AnnAssign)]
    known = {m.target.id: m.value is None for m in fields if isinstance(m.target, ast.Name)}
    told = update_info(MappedWeights([HANDLE]), "GPU-1")
    assert told.keys() <= known.keys() and {name for name, needed in known.items() if needed} <= told.keys()
    assert [list(handle) for handle in told["ipc_handles"]] == [["GPU-1"]]
    registered = (file.parent / "factory.py").read_text()
    assert f'"{BACKEND}"' in registered and "IPCWeightTransferEngine" in registered


def test_vllms_workers_have_the_methods_that_are_called(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("About", (), {"uuid": "GPU-1"}))
    file = installed / "v1" / "worker" / "gpu_worker.py"
    methods = {m.name: len(m.args.args) - 1 for m in members(file, "Worker") if isinstance(m, ast.FunctionDef)}
    for method, arguments in calls_to_load(MappedWeights([HANDLE])):
        assert methods[method] == len(arguments), method


def test_handles_of_a_cpu_are_not_for_vllms_transfer() -> None:
    with LiveWeights({"w": torch.ones(2)}).handles() as handles:
        assert [method for method, _ in calls_to_load(MappedWeights(handles))] == ["map_weights"]


def test_torch_rebuilds_a_tensor_from_these_arguments_in_this_order() -> None:
    named = inspect.signature(rebuild_cuda_tensor).bind(*rebuild_arguments(HANDLE)).arguments
    assert (named["tensor_size"], named["tensor_stride"], named["dtype"]) == ((3, 4), (4, 1), torch.bfloat16)
    assert (named["storage_device"], named["storage_handle"]) == (0, b"memory")
    assert (named["storage_size_bytes"], named["storage_offset_bytes"]) == (2048, 512)
    assert (named["ref_counter_handle"], named["ref_counter_offset"]) == (b"counter", 7)
    assert (named["event_handle"], named["event_sync_required"]) == (b"event", True)
    assert list(named).index("storage_device") == 6, "where vLLM puts its own device"
