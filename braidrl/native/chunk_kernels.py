"""Log-probs of a chunk of tokens and the gradient of its logits on the CPU, by compiled kernels; the formulas are in `compute.log_probs`.

C tokens, V vocabulary.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from braidrl.native.building import FLOAT, INT, LONG, NATIVE, POINTER, address, build, in_memory

SOURCE = NATIVE / "chunks.c"
DTYPES = (torch.float32, torch.bfloat16)
ARGUMENTS: dict[str, list[Any]] = {
    "statistics": [POINTER] * 2 + [FLOAT] + [POINTER] * 3 + [LONG] * 2 + [INT],
    "gradient": [POINTER] * 2 + [FLOAT] + [POINTER] * 4 + [LONG] * 2 + [INT],
    "accumulate": [POINTER] * 2 + [LONG, INT],
}


def has_kernels(*tensors: Tensor) -> bool:
    """Return True if these tensors are on the CPU in a supported dtype, and the kernels can be compiled."""
    return in_memory(*tensors) and all(t.dtype in DTYPES and _functions(t.dtype) is not None for t in tensors)


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs at `targets` (C,), log Σ exp of the logits (C, V) over temperature, and the entropies, in float32.

    Raises IndexError for a target outside the vocabulary.
    """
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[1]:
        raise IndexError(f"a target is outside of the vocabulary of {logits.shape[1]} tokens")
    log_probs, log_sums, entropies = torch.empty(3, len(logits))
    _functions(logits.dtype).statistics(
        address(logits, logits.dtype), address(targets, torch.int64), temperature,
        address(log_probs, torch.float32), address(log_sums, torch.float32), address(entropies, torch.float32),
        *logits.shape, torch.get_num_threads(),
    )  # fmt: skip
    return log_probs, log_sums, entropies


def gradient(
    logits: Tensor, targets: Tensor, temperature: float, log_sum: Tensor, entropy: Tensor, grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the gradient with respect to the logits (C, V), written over them."""
    of_entropy = None if grad_entropy is None else grad_entropy.contiguous()
    own = grad_log_prob.contiguous()
    _functions(logits.dtype).gradient(
        address(logits, logits.dtype), address(targets, torch.int64), temperature,
        address(log_sum, torch.float32), address(entropy, torch.float32), address(own, torch.float32),
        None if of_entropy is None else address(of_entropy, torch.float32), *logits.shape, torch.get_num_threads(),
    )  # fmt: skip
    return logits


def accumulate(total: Tensor, part: Tensor) -> None:
    """Add a tensor to a float32 tensor in place; torch would first copy it to float32."""
    _functions(part.dtype).accumulate(
        address(total, torch.float32), address(part, part.dtype), part.numel(), torch.get_num_threads()
    )


@cache
def _functions(dtype: torch.dtype) -> Any:
    functions = build(SOURCE, **({"BFLOAT16": 1} if dtype == torch.bfloat16 else {}))
    for name, types in ARGUMENTS.items() if functions else ():
        getattr(functions, name).argtypes, getattr(functions, name).restype = types, None
    return functions
