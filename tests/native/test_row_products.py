"""Products of rows with a weight, and experts of tokens, have the same bits among any others, and torch's result."""

from __future__ import annotations

import pytest
import torch

from braidrl.native.linear import PACKED, chosen_experts, gated_experts, packed, packed_bytes, row_product


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "inner", "experts", "active"), [(48, 40, 5, 2), (300, 7, 9, 3), (16, 64, 3, 1)])
def test_a_tokens_experts_have_the_same_bits_among_any_tokens(
    dtype: torch.dtype, width: int, inner: int, experts: int, active: int
) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(60, width, generator=generator).to(dtype)
    gate_up = (torch.randn(experts, 2 * inner, width, generator=generator) / 8).to(dtype)
    down = (torch.randn(experts, width, inner, generator=generator) / 8).to(dtype)
    # No token has the last expert, and the second half of the tokens has the same ones.
    chosen = torch.rand(60, max(experts - 1, active), generator=generator).topk(active).indices
    chosen[30:] = chosen[30]
    weights = torch.rand(60, active, generator=generator).to(dtype)
    together = gated_experts(x, chosen, weights, gate_up, down)
    expected = torch.zeros(60, width, dtype=torch.float64)
    for token in range(60):
        for expert, weight in zip(chosen[token].tolist(), weights[token].double(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            expected[token] += weight * (down[expert].double() @ (torch.nn.functional.silu(gate) * up))
    is_half = dtype == torch.bfloat16
    torch.testing.assert_close(
        together.double(), expected, rtol=4e-2 if is_half else 1e-5, atol=0.1 if is_half else 1e-4
    )
    panels = packed(gate_up), packed(down)
    for first, count in ((0, 1), (3, 5), (25, 16), (29, 31)):
        part = slice(first, first + count)
        for packs in ((None, None), panels):
            alone = gated_experts(x[part], chosen[part], weights[part], gate_up, down, packs)
            assert torch.equal(alone, together[part])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(gated_experts(x, chosen, weights, gate_up, down, panels), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "active"), [(8, 2), (128, 8), (3, 3)])
def test_experts_are_chosen_as_by_softmax_and_topk(dtype: torch.dtype, experts: int, active: int) -> None:
    logits = (3 * torch.randn(2000, experts, generator=torch.Generator().manual_seed(experts))).to(dtype)
    scores = logits.float().softmax(-1)
    # Of equal scores the first counts, which torch's `topk` leaves open.
    expected = scores.sort(descending=True, stable=True).indices[:, :active]
    weights = scores.gather(1, expected)
    limits = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-6}
    for normalised in (False, True):
        chosen, found = chosen_experts(logits, active, normalised)
        sums = weights.sum(1, keepdim=True) if normalised else 1
        assert torch.equal(chosen, expected)
        torch.testing.assert_close(found.float(), weights / sums, **limits)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_weights_of_experts_show_a_logit_that_is_no_number(normalised: bool) -> None:
    logits = torch.tensor([[float("nan")] * 4, [0.0, float("nan"), 2.0, 1.0]])
    chosen, weights = chosen_experts(logits, 4, normalised)
    assert weights.isnan().all() and int(chosen.min()) >= 0 and int(chosen.max()) < 4


def test_few_float32_matrices_are_packed_in_whole_panels() -> None:
    matrices = [torch.empty(20, 5), torch.empty(3, 16, 7)]
    assert packed_bytes(matrices) == 4 * (32 * 5 + 3 * 16 * 7) == 4 * len(packed(matrices[0])) + 4 * 3 * 16 * 7
    assert packed_bytes([torch.empty(PACKED // 16, 8, device="meta")]) == 0
    assert packed_bytes([torch.empty(20, 5, dtype=torch.bfloat16)]) == 0
