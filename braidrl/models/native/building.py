"""Compiles kernels for this processor, and one model's shape, with the system's C compiler; kept, so that it is done once.

source + shape + processor ──hash──▶ kept library? ──no──▶ cc, under a second ──▶ loaded with ctypes
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from braidrl.errors import UserError

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
HEADER = Path(__file__).parent / "numbers.h"
# No -ffast-math: it lets denormal numbers become 0 in the whole process.
FLAGS = (
    "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC",
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
)  # fmt: skip
WIDE = "-mprefer-vector-width=512"
PROCESSOR = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Library:
    """Loaded kernels, and the seconds that compiling them took; 0 where they had been kept."""

    functions: ctypes.CDLL
    seconds: float


def compiler() -> str | None:
    """The system's C compiler, if there is one."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")


def build(source: Path, **constants: int) -> Library:
    """The kernels of a C file with these constants defined. Raises UserError where nothing compiles them."""
    command = compiler()
    if command is None:
        raise UserError(
            "compiled kernels need a C compiler; install gcc or clang, or turn off what asks for them (compile: false)"
        )
    flags = [*FLAGS, f"-I{HEADER.parent}", *(f"-D{name}={value}" for name, value in constants.items())]
    flags += [WIDE] * (platform.machine() == "x86_64")
    kept = _folder() / f"{source.stem}-{_name(source, command, flags)}.so"
    seconds = 0.0
    if not kept.exists():
        start = time.perf_counter()
        _compile(source, command, flags, kept)
        seconds = time.perf_counter() - start
    return Library(ctypes.CDLL(str(kept)), seconds)


def _compile(source: Path, command: str, flags: list[str], target: Path) -> None:
    """Into a file of its own first: several processes may compile at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        done = subprocess.run([command, *flags, str(source), "-o", str(made), "-lm"], capture_output=True, text=True)
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise UserError(f"{command} failed on {source.name} ({reason}); turn off what asks for it (compile: false)")
        os.replace(made, target)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "braidrl"


def _name(source: Path, command: str, flags: list[str]) -> str:
    """Of everything that decides what the compiler makes, the processor included: a home folder may be shared by several."""
    parts = [source.read_text(), HEADER.read_text(), command, *flags, platform.platform(), *_processor()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> list[str]:
    """Its name and what it can do, where the system says so."""
    if not PROCESSOR.exists():
        return [platform.processor()]
    lines = PROCESSOR.read_text().splitlines()
    return [line for line in lines if line.startswith(("model name", "flags"))][:2]


def address(tensor: Tensor, dtype: torch.dtype) -> int:
    """The address of a tensor's numbers. Raises TypeError for one that the kernels would misread."""
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.is_cuda:
        raise TypeError(f"a contiguous {dtype} tensor in memory is needed, got {tensor.dtype} {tensor.stride()}")
    return tensor.data_ptr()
