"""Where Braid asks what kind of device it has, by FILE:FUNCTION, and the test that goes the way of a CUDA device there.

A test is FILE:NAME; `cuda/test_without_cuda.py` runs those of `cuda/checks.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import braidrl

PACKAGE = Path(braidrl.__file__).parent
KINDS = ("cpu", "cuda")
RECIPES = "cuda/checks.py:test_every_recipe_trains"
SETTINGS = "cuda/checks.py:test_a_run_with_its_settings_trains"
FUSED = "cuda/checks.py:test_fused_layers_compute_what_torch_does"
DEFAULT = "cuda/checks.py:test_the_type_by_default_is_bfloat16_with_masters_of_float32"
FLOAT32 = "cuda/checks.py:test_numbers_are_those_of_the_cpu"
OFFLOADED = "cuda/checks.py:test_what_is_offloaded_leaves_the_device_and_the_host_does_not_wait"
WEIGHTS = "cuda/checks.py:test_new_weights_leave_the_device_in_a_stream_beside_that_of_the_next_batch"
PLANNED = "placement/plan/test_search.py:test_mixed_kinds_put_each_set_on_one_kind"

COVERED = {
    "runtimes/prepare/checks.py:lacking": "test_bad_input.py:test_a_mistake_in_the_configuration_is_named",
    "algorithms/ragged.py:Ragged.__post_init__": RECIPES,
    "algorithms/ragged.py:Ragged.take": RECIPES,
    "cluster/devices.py:choose_device": RECIPES,
    "cluster/devices.py:has_bfloat16": DEFAULT,
    "models/role_settings.py:dtype_name": DEFAULT,
    "runtimes/prepare/checks.py:check_dtypes": DEFAULT,
    "cluster/devices.py:device_count": (
        "cluster/test_devices.py:test_processes_of_this_machine_report_the_devices_that_they_were_given"
    ),
    "cluster/ray_cluster.py:RayCluster.__init__": (
        "cluster/test_devices.py:test_processes_on_ray_report_the_devices_that_they_were_given"
    ),
    "models/compute/attention.py:PackedSequences.attend": RECIPES,
    "models/compute/attention.py:attend_equal": FLOAT32,
    "models/cpu/linear.py:_by_onednn": RECIPES,
    "models/cpu/native/building.py:in_memory": RECIPES,
    "models/memory/offload.py:OffloadableTensors.offload": OFFLOADED,
    "models/memory/offload.py:empty": OFFLOADED,
    "models/memory/offload.py:occupy": OFFLOADED,
    "models/role_settings.py:merges_adapters": SETTINGS,
    "models/compute/chunks.py:chunk_kernels": FUSED,
    "placement/machine.py:own_rates": RECIPES,
    "placement/plan/devices.py:Cluster.device": PLANNED,
    "placement/plan/devices.py:_group": PLANNED,
    "placement/plan/problem.py:Problem.works": PLANNED,
    "rollout/embedded/engine.py:EmbeddedEngine.__init__": SETTINGS,
    "rollout/embedded/native/decoder.py:native_decoder": SETTINGS,
    "rollout/embedded/slots.py:_attend": RECIPES,
    "runtimes/streaming/weights.py:beside_computing": WEIGHTS,
    "runtimes/streaming/weights.py:in_host_memory": WEIGHTS,
    "runtimes/usage.py:DeviceUsage.memory_of": RECIPES,
    "runtimes/usage.py:DeviceUsage.note_memory": RECIPES,
}
"""The test that goes the way of CUDA."""
NCCL = "needs NCCL between devices: `make gpu` has a group of one rank"
UNCOVERED = {
    "cluster/groups.py:group_between": NCCL,
    "models/cpu/native/building.py:address": "refuses what `in_memory` lets nobody ask for",
    "models/parallel/decoding.py:TensorRanks.all_reduce": NCCL,
    "rollout/divided/followers.py:_parts": NCCL,
    "rollout/process/client.py:EngineProcess.start": "starts as a copy of the fork server on a CPU alone",
    "rollout/process/client.py:process_spec": "leaves a setting of vLLM for CPUs out",
    "rollout/vllm/engine.py:start": "leaves settings of vLLM for CPUs out",
    "rollout/vllm/transfer.py:calls_to_load": "vLLM's own transfer is for CUDA alone; what it is told is compared with the installed one",
    "rollout/weights/broadcast.py:Broadcast.run": NCCL,
    "rollout/weights/broadcast.py:join": NCCL,
    "rollout/weights/broadcast.py:receive_tensors": NCCL,
    "runtimes/distributed/launch.py:in_ranks": NCCL,
    "runtimes/distributed/launch.py:joined_world": NCCL,
    "runtimes/hybrid/pool_worker.py:PoolWorker.exchange_weights": NCCL,
    "runtimes/hybrid/pool_worker.py:PoolWorker.join_process_group": NCCL,
    "runtimes/prepare/doctor.py:examine": "says what there is",
    "runtimes/prepare/doctor.py:trains": "computes on the device that there is",
    "runtimes/streaming/processes.py:work": NCCL,
}
"""Why nothing but a real device can go there."""


def branches() -> set[str]:
    """Every function of the package that compares a device, or asks whether there is one."""
    return {place for path in sorted(PACKAGE.rglob("*.py")) for place in branches_of(path)}


def branches_of(path: Path) -> Iterator[str]:
    def walk(node: ast.AST, name: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
            inside = f"{name}.{child.name}" if named and name else child.name if named else name
            if asks(child):
                yield f"{path.relative_to(PACKAGE)}:{inside}"
            yield from walk(child, inside)

    return walk(ast.parse(path.read_text()), "")


def asks(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("is_cuda", "is_available") and "mkldnn" not in ast.unparse(node)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(isinstance(side, ast.Constant) and side.value in KINDS for side in sides)
    return False
