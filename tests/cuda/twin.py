"""A simulated CUDA device: torch's fake tensors know the device of each tensor, and a CPU shadow holds its numbers.

an operation ──▶ FakeTensorMode: devices, shapes, dtypes      as on CUDA; a tensor on another device is an error
             └─▶ the same operation on the shadows            so that code that depends on numbers continues as it would

The mode records each place in Braid that makes the host wait for the device, or that computes in float64.
`device.cpp` must have been preloaded, for autograd.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.varlen  # its operations
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

import braidrl
from tests.cuda.attention import varlen_backward, varlen_forward

aten = torch.ops.aten
PACKAGE = f"{Path(braidrl.__file__).parent}/"
MEMORY = 1 << 30
HALF = (torch.bfloat16, torch.float16)
KERNELS = {
    torch.ops.torch_attn._varlen_attn.default: varlen_forward,
    torch.ops.torch_attn._varlen_attn_backward.default: varlen_backward,
}
"""Replacements of operations that CPUs do not have."""


def shadow(value: Any) -> Any:
    """Return the CPU tensor with a fake tensor's values; return anything else unchanged."""
    return value.twin if isinstance(value, FakeTensor) else value


def is_view(function: Any) -> bool:
    """Return True for an operation that computes nothing: its result is a view of an argument."""
    aliases = (result.alias_info for result in function._schema.returns)
    return function is aten._unsafe_view.default or any(alias and not alias.is_write for alias in aliases)


def place() -> str:
    """Return Braid's innermost running function as FILE:FUNCTION."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            return f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname.split('.<locals>')[0]}"
        frame = frame.f_back
    return "autograd"


class CudaTwin(TorchDispatchMode):
    """A mode in which `cuda` is an ordinary device.

    `waits` and `doubles` hold the places that made the host wait or used float64.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits: dict[str, str] = {}
        self.doubles: dict[str, str] = {}
        self.operations: list[tuple[Any, Any, Any, Any]] | None = None
        self.launches: Counter[str] | None = None
        """Kernels by name since it was set to an empty counter."""
        self._in_kernel = 0
        self._storages: dict[int, torch.UntypedStorage] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Compile nothing: dynamo need not be imported, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        expected = None if device is None else torch.device(device).type
        if FakeTensor not in types and expected is None and func is not aten.copy_.default:
            return func(*args, **kwargs)
        fakes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        if not fakes and expected != "cuda":
            return func(*args, **kwargs)
        if expected == "cpu" or (func is aten.copy_.default and not isinstance(args[0], FakeTensor)):
            return self._to_host(func, args, kwargs)
        if not fakes:
            made = self._on_device(self._computed(func, args, kwargs))
            self._record(func, args, kwargs, made)
            return made
        self._check(func, args)
        try:
            made = self.fake.dispatch(func, types, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            self._wait(func)
            made = None
        real = self._computed(func, args, kwargs)
        if made is None:
            return self._on_device(real)
        self._keep(made, real)
        self._note_doubles(func, fakes, made)
        self._record(func, args, kwargs, made)
        return made

    def _record(self, *operation: Any) -> None:
        if self.operations is not None:
            self.operations.append(operation)
        if self.launches is not None and not self._in_kernel and not is_view(operation[0]):
            self.launches[operation[0].name()] += 1

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts as one launch, whatever operations it makes."""

        def launch(*given: Any, **named: Any) -> Any:
            if self.launches is not None and not self._in_kernel:
                self.launches[function.__name__] += 1
            self._in_kernel += 1
            try:
                return function(*given, **named)
            finally:
                self._in_kernel -= 1

        return launch

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Execute the operation on the shadows."""
        args, kwargs = tree_map(self._shadow, (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return KERNELS.get(func, func)(*args, **kwargs)

    def _shadow(self, value: Any) -> Any:
        if isinstance(value, torch.UntypedStorage):
            return self._storages[value._cdata]
        return shadow(value)

    def _to_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not (kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:3] == (True,))):
            self._wait(func)
        return func(*tree_map(shadow, args), **{name: shadow(value) for name, value in kwargs.items()})

    def _wait(self, func: Any) -> None:
        if self.operations is not None:
            raise RuntimeError(f"{func} makes the host wait, which a graph that is being recorded cannot ({place()})")
        self.waits.setdefault(place(), str(func))

    def _check(self, func: Any, args: Any) -> None:
        """Raise for inputs that CUDA's kernels refuse."""
        if func in KERNELS and args[0].dtype not in HALF:
            raise RuntimeError(f"{func} takes half precision, not {args[0].dtype}")
        if func is aten.index.Tensor:
            masks = [t for t in args[1] if t is not None and t.dtype == torch.bool]
            if masks or any(not isinstance(t, FakeTensor) for t in args[1] if t is not None):
                self._wait(func)

    def _note_doubles(self, func: Any, fakes: list[FakeTensor], made: Any) -> None:
        floats = [t for t in tree_leaves(made) if isinstance(t, Tensor) and t.dtype == torch.float64 and t.dim()]
        if floats and not all(t.dtype == torch.float64 for t in fakes if t.is_floating_point() and t.dim()):
            self.doubles.setdefault(place(), str(func))

    def _on_device(self, real: Any) -> Any:
        """Return fake tensors for results whose shape depends on data."""

        def faked(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            with self.fake:
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
            self._keep(made, value)
            return made

        return tree_map(faked, real)

    def _keep(self, made: Any, real: Any) -> None:
        for fake, own in zip(tree_leaves(made), tree_leaves(real), strict=True):
            if isinstance(fake, FakeTensor):
                # Some buffers for the backward pass are empty on CUDA.
                if fake.dtype != own.dtype or (fake.numel() and fake.shape != own.shape):
                    raise RuntimeError(f"CUDA gives {fake.dtype} {fake.shape}, the CPU {own.dtype} {own.shape}")
                fake.twin = own  # type: ignore[attr-defined]
                self._storages[fake.untyped_storage()._cdata] = own.untyped_storage()


class _Graph:
    """A recorded step: it repeats its operations on the shadows that they touched."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        for func, args, kwargs, made in self.operations:
            args, kwargs = tree_map(shadow, (args, {k: v for k, v in kwargs.items() if k != "device"}))
            again = KERNELS.get(func, func)(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, FakeTensor) and old.twin.data_ptr() != new.data_ptr():  # type: ignore[attr-defined]
                    old.twin.copy_(new)  # type: ignore[attr-defined]


@contextmanager
def cuda_twin() -> Iterator[CudaTwin]:
    """Return a mode in which Braid runs with `device=cuda`; streams do nothing, and graphs replay operations."""
    twin = CudaTwin()

    @contextmanager
    def record(graph: _Graph, pool: Any = None) -> Iterator[None]:
        twin.operations = graph.operations
        try:
            yield
        finally:
            twin.operations = None

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        yield

    stand_ins: dict[str, Any] = {
        "graph_pool_handle": lambda: None,
        "Stream": lambda *device: mock.MagicMock(),
        "current_stream": lambda *device: mock.MagicMock(),
        "stream": on_stream,
        "CUDAGraph": _Graph,
        "graph": record,
        "synchronize": lambda: None,
        "device_count": lambda: 1,
        "_lazy_init": lambda: None,
        "get_device_name": lambda: "NVIDIA A100-SXM4-80GB",
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 3 << 20,
        "max_memory_reserved": lambda: 5 << 20,
        "mem_get_info": lambda: (MEMORY, MEMORY),
        "get_device_properties": lambda number: mock.MagicMock(total_memory=MEMORY),
    }
    known = torch._C.StorageBase.device  # type: ignore[attr-defined]

    def device_of(storage: Any) -> torch.device:
        result: torch.device = known.__get__(storage)
        return torch.device("cuda", 0) if result.type == "meta" else result

    moved = PreTrainedModel.to

    def to(model: Any, *args: Any, **kwargs: Any) -> Any:
        """A moved parameter becomes a new object here, unlike on CUDA, so tied parameters are tied again."""
        moved(model, *args, **kwargs).tie_weights()
        return model

    with (
        mock.patch.multiple(torch.cuda, **stand_ins),
        mock.patch.object(PreTrainedModel, "to", to),
        mock.patch.object(FakeTensor, "data_ptr", lambda tensor: tensor.twin.data_ptr()),
        mock.patch.object(FakeTensor, "__deepcopy__", lambda tensor, memo: tensor.detach().clone(), create=True),
        mock.patch.object(torch.UntypedStorage, "device", property(device_of)),
        twin,
    ):
        # `torch.tensor(..., device="cuda")` makes a tensor on the CPU, and copies it where the mode sees it.
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield twin
        finally:
            torch._C._set_only_lift_cpu_tensors(before)
