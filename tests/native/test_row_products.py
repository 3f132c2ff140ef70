"""The product of rows with a weight gives each row the same bits in any number of rows, and torch's result."""

from __future__ import annotations

import pytest
import torch

from braidrl.native.linear import PACKED, packed, packed_bytes, row_product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "columns"), [(64, 48), (50, 7), (300, 130), (8, 1)])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(dtype: torch.dtype, inner: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(inner)
    x = torch.randn(1500, inner, generator=generator).to(dtype)
    weight = torch.randn(columns, inner, generator=generator).to(dtype)
    bias = torch.randn(columns, generator=generator).to(dtype)
    together = row_product(x, weight, bias)
    expected = (x.double() @ weight.double().T + bias.double()).to(dtype)
    torch.testing.assert_close(together, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    panels = packed(weight)
    for first, count in ((0, 1), (0, 2), (3, 5), (7, 16), (11, 33), (1499, 1)):
        rows = x[first : first + count].clone()
        assert torch.equal(row_product(rows, weight, bias), together[first : first + count])
        assert torch.equal(row_product(rows, weight, bias, panels), together[first : first + count])
    for threads in (2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert torch.equal(row_product(x[:20], weight, bias), together[:20])
        finally:
            torch.set_num_threads(before)


def test_a_product_without_a_bias_equals_one_with_a_bias_of_zero() -> None:
    x, weight = torch.randn(3, 40), torch.randn(9, 40)
    assert torch.equal(row_product(x, weight), row_product(x, weight, torch.zeros(9)))


def test_few_float32_matrices_are_packed_in_whole_panels() -> None:
    matrices = [torch.empty(20, 5), torch.empty(3, 16, 7)]
    assert packed_bytes(matrices) == 4 * (32 * 5 + 3 * 16 * 7) == 4 * len(packed(matrices[0])) + 4 * 3 * 16 * 7
    assert packed_bytes([torch.empty(PACKED // 16, 8, device="meta")]) == 0
    assert packed_bytes([torch.empty(20, 5, dtype=torch.bfloat16)]) == 0
