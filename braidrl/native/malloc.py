"""How the C library keeps memory that tensors on a CPU gave back, so that the next step does not ask the system for it again.

glibc by default returns the top of the heap when a step ends. The next one then meets each of its pages as new, which the system
fills with zeros first: a step of 4,096 tokens through four layers of width 256 took a quarter more time.
"""

import ctypes
import os
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of malloc.h."""
KEPT_BYTES = 1 << 30
"""Free memory at the heap's end that stays with the process."""
LARGE_BYTES = 32 << 20
"""Tensors from this size on are given back at once. The C library takes no higher number."""


@cache
def keep_freed_memory() -> bool:
    """Make this process keep up to KEPT_BYTES of freed memory.

    Returns False where the C library has no such settings, or the environment (MALLOC_..., GLIBC_TUNABLES) has made them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    return bool(mallopt(TRIM_THRESHOLD, KEPT_BYTES)) and bool(mallopt(MMAP_THRESHOLD, LARGE_BYTES))
