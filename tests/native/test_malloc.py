"""Freed memory is reused without a request to the system."""

import subprocess
import sys

import pytest

from braidrl.native.malloc import keep_freed_memory

FAULTS = """
import ctypes, resource, sys
from braidrl.native.malloc import keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
SIZE, COUNT = 1 << 20, 200

def step():
    blocks = [library.malloc(SIZE) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    for block in blocks:
        library.free(block)

for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of_a_step(*words: str) -> int:
    """Return the number of pages that a third step over 200 MiB faults in."""
    done = subprocess.run([sys.executable, "-c", FAULTS, *words], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not keep_freed_memory(), reason="this C library has no mallopt")
def test_a_step_meets_no_new_pages():
    assert 10 * faults_of_a_step("keep") < faults_of_a_step()


def test_settings_of_the_environment_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")
    assert not keep_freed_memory.__wrapped__()
