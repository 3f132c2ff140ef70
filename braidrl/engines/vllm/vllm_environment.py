"""The environment variables with which vLLM starts, in a process of its own or in a rank that trains."""

import os

DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
    # Otherwise vLLM binds each worker to a NUMA node of its own, and refuses more workers than nodes.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
"""Set unless the run's own environment sets them."""


def vllm_environment(device: str) -> dict[str, str]:
    """Return the variables to set for vLLM on a kind of device."""
    own = {name: value for name, value in DEFAULTS.items() if name not in os.environ}
    # On the CPU vLLM computes eagerly, but would still compile small parts of its sampling with a C++ compiler.
    return own | ({"TORCHDYNAMO_DISABLE": "1"} if device == "cpu" else {})
