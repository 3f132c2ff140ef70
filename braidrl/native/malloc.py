"""Settings of malloc with which a process keeps the memory of freed CPU tensors for the next step.

By default glibc returns the top of the heap to the system when a step ends. The next step then gets new pages, which
the system first fills with zeros: a step of 4,096 tokens through four layers of width 256 took a quarter more time.
"""

import ctypes
import os
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of malloc.h."""
KEPT_BYTES = 1 << 30
"""Free memory at the end of the heap that the process keeps."""
LARGE_BYTES = 32 << 20
"""Tensors of this size or larger are returned to the system at once. The C library accepts no higher value."""


@cache
def keep_freed_memory() -> bool:
    """Keep up to KEPT_BYTES of freed memory; return False if the C library cannot, or the environment sets it (MALLOC_,
    GLIBC_TUNABLES).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    return bool(mallopt(TRIM_THRESHOLD, KEPT_BYTES)) and bool(mallopt(MMAP_THRESHOLD, LARGE_BYTES))
