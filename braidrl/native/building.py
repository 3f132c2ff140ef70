"""Compiles kernels for this processor and one model's shape with the system's C compiler, and caches the result.

source + shape + processor ─hash─▶ cached library? ─no, or its digest differs─▶ cc, about a second ─▶ loaded with ctypes

A library's digest is in its name, so a truncated, overwritten or planted file is compiled again. Without a working
compiler the log says so once, and torch computes instead.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from braidrl.errors import UserError

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
NATIVE = Path(__file__).parent
HEADER = NATIVE / "numbers.h"
# No -ffast-math: it lets denormal numbers become 0 in the whole process.
FLAGS = (
    "-O3",
    "-march=native",
    # For some processors gcc writes x += a * b as two operations where sums are few: a row's bits would depend on the
    # number of rows.
    "--param=avoid-fma-max-bits=0",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
)
WIDE = "-mprefer-vector-width=512"
PROCESSOR = Path("/proc/cpuinfo")
FACTS = ("vendor_id", "cpu family", "model name", "flags")
SIGNATURES: dict[str, dict[str, list[Any]]] = {
    "attention": {"attention": [INT, *[POINTER] * 10, *[LONG] * 6, FLOAT, INT]},
    "chunks": {
        "statistics": [None, *[POINTER] * 2, FLOAT, *[POINTER] * 3, *[LONG] * 2, INT],
        "gradient": [None, *[POINTER] * 2, FLOAT, *[POINTER] * 4, *[LONG] * 2, INT],
        "accumulate": [None, *[POINTER] * 2, LONG, INT],
    },
    "decode": {
        "add_norm": [None, *[POINTER] * 4, *[LONG] * 2, FLOAT, INT],
        "gated": [None, *[POINTER] * 2, *[LONG] * 2, INT],
        "attend": [INT, *[POINTER] * 3, FLOAT, *[POINTER] * 7, *[LONG] * 4, FLOAT, INT],
        "lay_out": [None, *[POINTER] * 12, *[LONG] * 3],
        "keep": [LONG, *[POINTER] * 16, *[LONG] * 3],
        "draw": [None, *[POINTER] * 8, *[LONG] * 2, INT],
    },
    "drafts": {
        "open_book": [POINTER],
        "close_book": [None, POINTER],
        "read_text": [INT, *[POINTER] * 6, *[LONG] * 2],
        "read_rows": [INT, *[POINTER] * 9, *[LONG] * 2],
        "draft": [None, *[POINTER] * 12, *[LONG] * 3, FLOAT],
    },
    "layers": {
        "norm_forward": [None, *[POINTER] * 4, *[LONG] * 2, FLOAT, INT],
        "norm_backward": [None, *[POINTER] * 6, *[LONG] * 3, INT],
        "gate_forward": [None, *[POINTER] * 3, *[LONG] * 3, INT],
        "gate_backward": [None, *[POINTER] * 5, *[LONG] * 3, INT],
        "scaled_gate_backward": [None, *[POINTER] * 6, *[LONG] * 2, INT],
        "rotate": [None, *[POINTER] * 4, *[LONG] * 3, INT, INT],
    },
    "products": {
        "pack": [None, *[POINTER] * 2, *[LONG] * 2, INT],
        "product": [INT, *[POINTER] * 5, *[LONG] * 3, INT],
        "route": [None, *[POINTER] * 3, *[LONG] * 3, INT, INT],
        "mixture": [INT, *[POINTER] * 8, *[LONG] * 5, INT],
    },
}
"""The C functions of each source, each with the types of its result and of its arguments."""
logger = logging.getLogger(__name__)
_say_once = cache(logger.warning)


def build(source: Path, **constants: int) -> ctypes.CDLL | None:
    """Compile a C file with these constants defined, or load the cached result; return None if no compiler works."""
    command = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if command is None:
        _say_once("no C compiler, so torch computes what kernels would: install gcc or clang, or write compile=false")
        return None
    flags = [*FLAGS, f"-I{HEADER.parent}", *(f"-D{name}={value}" for name, value in constants.items())]
    flags += [WIDE] * (platform.machine() == "x86_64")
    # Everything that the compiled code depends on, also the processor: several machines may share a home folder.
    parts = [source.read_text(), HEADER.read_text(), command, *flags, platform.platform(), *processor().values()]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    name, cached = f"{source.stem}-{digest[:16]}", None
    # Remove cached libraries whose digest is wrong. A process that has loaded one keeps it.
    for cached_library in sorted(cache_folder().glob(f"{name}.*.so")):
        if cached_library.name == f"{name}.{hashlib.sha256(cached_library.read_bytes()).hexdigest()[:32]}.so":
            cached = cached_library
        else:
            cached_library.unlink(missing_ok=True)
    if cached is None:
        # Compile into a temporary file first, since several processes may compile concurrently.
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            output = Path(folder) / f"{name}.so"
            done = subprocess.run(
                [command, *flags, str(source), "-o", str(output), "-lm"], capture_output=True, text=True
            )
            if done.returncode:
                reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
                _say_once(f"{command} failed on {source.name}, so torch computes what its kernels would: {reason}")
                return None
            cached = cache_folder() / f"{name}.{hashlib.sha256(output.read_bytes()).hexdigest()[:32]}.so"
            os.replace(output, cached)
        logger.info("compiled %s in %.1f s", source.name, time.perf_counter() - start)
    return ctypes.CDLL(str(cached))


@cache
def library(name: str, dtype: torch.dtype, **constants: int) -> Any:
    """Return the functions of `name.c` for a dtype, with these constants defined, or None if no compiler works."""
    functions = build(NATIVE / f"{name}.c", **constants, **({"BFLOAT16": 1} if dtype == torch.bfloat16 else {}))
    for function, (result, *arguments) in SIGNATURES[name].items() if functions else ():
        getattr(functions, function).argtypes, getattr(functions, function).restype = arguments, result
    return functions


def cache_folder() -> Path:
    """Return this user's cache folder for this machine, created if missing. Raises UserError if that fails."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "braidrl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}, where compiled kernels and proofs of models are kept, cannot be made ({error.strerror}); "
            "set XDG_CACHE_HOME to a folder of yours"
        ) from error
    return folder


def processor() -> dict[str, str]:
    """Return the processor's vendor, model and flags by Linux's names, without values that change at run time."""
    if not PROCESSOR.exists():
        return {"model name": platform.processor()}
    lines = PROCESSOR.read_text().split("\n\n")[0].splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {name: fields[name] for name in FACTS if name in fields}


def in_memory(*tensors: Tensor) -> bool:
    """Return True for plain CPU tensors with values at their addresses; not DTensors or pending collectives."""
    return all(type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" for tensor in tensors)


def address(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the address of a tensor's values. Raises TypeError for a tensor that the kernels would misread."""
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.is_cuda:
        raise TypeError(f"a contiguous {dtype} tensor in memory is needed, got {tensor.dtype} {tensor.stride()}")
    return tensor.data_ptr()
