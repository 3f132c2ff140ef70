"""Which of its methods vLLM's workers load a version by: on CUDA those of vLLM's own weight transfer, where that serves.

a file              ──▶ Braid's `take_weights`: vLLM's transfer reads none
handles on CUDA     ──▶ vLLM's transfer, backend `ipc`
handles on a CPU    ──▶ Braid's `map_weights`: vLLM's transfer is for CUDA alone

Weights that servers are sent are Braid's too: vLLM's NCCL backend would have the trainer's process import vLLM, has no limit to its
waiting and no checksum.
"""

from collections.abc import Mapping
from typing import Any

import torch

from braidrl.weights.handles import MappedWeights
from braidrl.weights.shared_file import WeightFile

BACKEND = "ipc"
"""Of vLLM's `weight_transfer_config`."""
WorkerCall = tuple[str, tuple[Any, ...]]


def calls_to_load(weights: WeightFile | MappedWeights) -> list[WorkerCall]:
    """Return the methods of vLLM's workers, with their arguments, that load a version one after the other."""
    if isinstance(weights, WeightFile):
        return [("take_weights", (str(weights.path),))]
    if any(handle["device"] == "cuda" for handle in weights.handles):
        device = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return [
            ("start_weight_update", ()),
            ("update_weights", (update_info(weights, device),)),
            ("finish_weight_update", ()),
        ]
    return [("map_weights", (list(weights.handles),))]


def update_info(weights: MappedWeights, device: str) -> dict[str, Any]:
    """Return CUDA handles as vLLM's `IPCWeightTransferUpdateInfo` has them.

    Args:
        weights: Mapped from this device.
        device: Its UUID.
    """
    return {
        "names": [handle["name"] for handle in weights.handles],
        "dtype_names": [handle["dtype"] for handle in weights.handles],
        "shapes": [handle["shape"] for handle in weights.handles],
        "ipc_handles": [{device: rebuild_arguments(handle)} for handle in weights.handles],
    }


def rebuild_arguments(handle: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what torch's `rebuild_cuda_tensor` takes for a handle."""
    number, memory, size, offset, *counting = handle["place"]
    shape = torch.Size(handle["shape"])
    stride = torch.empty(shape, device="meta").stride()
    dtype, requires_grad = getattr(torch, handle["dtype"]), False
    counter, place, event, waits = counting
    return (
        torch.Tensor, shape, stride, 0, torch.UntypedStorage, dtype, number, memory, size, offset, requires_grad,
        counter, place, event, waits,
    )  # fmt: skip
