"""Compares the Triton kernels of a decode step with plain torch by Triton's interpreter, and compiles them for devices
that are not there; `test_triton.py` runs it with a Python that has Triton.
"""

from __future__ import annotations

import os
import sys

import torch
import triton
from torch.testing import assert_close

from braidrl.engines.embedded import cuda_kernels as kernels
from tests.cuda.step_kernels import PlainKernels

SHAPES = [(2, 2, 32, True, None), (7, 2, 16, False, None), (3, 1, 64, True, 5), (1, 2, 16, True, None)]
"""Query heads per key head, key heads, head width, with norms, window."""
ARCHITECTURES = (80, 90)


def compare(dtype: torch.dtype) -> None:
    """Raise AssertionError where a kernel differs from plain torch by more than rounding."""
    rounding = 2e-6 if dtype == torch.float32 else 2e-2
    fused, plain = kernels.CudaKernels(), PlainKernels()
    torch.manual_seed(0)
    slots, positions = torch.tensor([4, 0, 2, 5, 1]), torch.tensor([0, 1, 17, 90, 64])
    for group, heads, width, has_norms, window in SHAPES:
        stores = [torch.randn(6, heads, 96, width).to(dtype) for _ in range(2)]
        projected = torch.randn(5, (group + 2) * heads * width).to(dtype)
        weights = (torch.rand(width).to(dtype), torch.rand(width).to(dtype)) if has_norms else None
        angles = torch.randn(5, width), torch.randn(5, width)
        results = []
        for computed in (fused, plain):
            keys, values = (store.clone() for store in stores)
            out = computed.attend(projected, weights, 1e-6, angles, slots, positions, keys, values, window, width**-0.5)
            results.append((out, keys, values))
        for one, other in zip(*results, strict=True):
            assert_close(one, other, rtol=rounding, atol=rounding)
        assert torch.equal(results[0][2], results[1][2])
    residual, update, weight = torch.randn(3, 130), torch.randn(3, 130).to(dtype), torch.randn(130).to(dtype)
    for given in (update, None):
        pair = residual.clone(), residual.clone()
        normed = [k.add_norm(r, given, weight, 1e-6) for k, r in zip((fused, plain), pair, strict=True)]
        assert torch.equal(*pair)
        assert_close(*normed, rtol=rounding, atol=rounding)
    both = torch.randn(3, 2 * 1030).to(dtype)
    assert_close(fused.gated(both), plain.gated(both), rtol=rounding, atol=rounding)


def compile_for(architecture: int, dtype: str) -> None:
    """Compile the kernels to machine code of a device; Triton raises where one cannot be."""
    number = f"*{dtype}"
    sizes = {"width": "i32", "epsilon": "fp32"}
    of_row = dict.fromkeys(("update", "weight", "out"), number)
    jobs = [
        (kernels.add_norm_kernel, {"residual": "*fp32", **of_row, **sizes}, {"HAS_UPDATE": True, "BLOCK": 1024}),
        (kernels.gated_kernel, {"both": number, "out": number, "width": "i32"}, {"BLOCK": 1024}),
    ]
    given = {
        **dict.fromkeys(("projected", "query_weight", "key_weight", "keys", "values", "out"), number),
        **dict.fromkeys(("cosine", "sine"), "*fp32"),
        **dict.fromkeys(("slots", "positions"), "*i64"),
        **dict.fromkeys(("epsilon", "scaling"), "fp32"),
        **dict.fromkeys(("capacity", "window", "key_heads"), "i32"),
    }
    for group, groups, width in ((7, 8, 64), (2, 2, 128)):
        shape = {"GROUP": group, "GROUPS": groups, "HALF": width // 2, "BLOCK": 32, "HAS_NORMS": group == 2}
        jobs.append((kernels.attend_kernel, given, shape))
    for function, arguments, constants in jobs:
        signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
        source = triton.compiler.ASTSource(function, signature, constexprs=constants)
        target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
        assert len(triton.compile(source, target=target).asm["cubin"]) > 1000


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        compare(getattr(torch, sys.argv[1]))
    else:
        for number in ARCHITECTURES:
            compile_for(number, sys.argv[1])
