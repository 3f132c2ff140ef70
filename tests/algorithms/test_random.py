"""Random numbers depend only on their keys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.algorithms.random import hashed, permutation, uniform

keys = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6)


def test_the_first_numbers_are_those_of_splitmix64() -> None:
    # The seed 1234567 and its numbers are published with the generator's reference code.
    state = torch.tensor([0, 1]) * torch.tensor(0x9E3779B97F4A7C15 - 2**64) + 1234567
    assert [int(h) % 2**64 for h in hashed(state)] == [6457827717110365317, 3203168211198807973]


@given(keys)
def test_plain_numbers_and_tensors_give_the_same_bits(numbers: list[int]) -> None:
    as_tensors = [torch.tensor([number]) for number in numbers]
    assert int(hashed(*numbers)) == int(hashed(*as_tensors)) == int(hashed(*numbers[:-1], as_tensors[-1]))


@given(keys, st.integers(1, 9), st.integers(1, 9))
def test_a_number_does_not_depend_on_the_batch_around_it(numbers: list[int], rows: int, columns: int) -> None:
    grid = uniform(*numbers, torch.arange(rows)[:, None], "purpose", torch.arange(columns))
    alone = uniform(*numbers, rows - 1, "purpose", torch.tensor(columns - 1))
    assert grid.shape == (rows, columns) and grid[-1, -1] == alone


def test_numbers_are_uniform_in_the_half_open_unit_interval() -> None:
    numbers = uniform(7, torch.arange(64)[:, None], torch.arange(4096))
    assert numbers.dtype == torch.float64 and numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers.double().flatten(), 64, 0, 1)
    # Chi-square with 63 degrees of freedom: 130 is beyond six standard deviations.
    assert ((counts - 4096) ** 2 / 4096).sum() < 130
    neighbours = torch.corrcoef(torch.stack([numbers[:, :-1].flatten(), numbers[:, 1:].flatten()]).double())[0, 1]
    assert neighbours.abs() < 0.01


def test_one_changed_bit_in_any_key_changes_half_of_the_bits() -> None:
    base = [3, 5, 8, 13]
    reference = int(hashed(*base)) % 2**64
    flips = [
        ((int(hashed(*base[:i], base[i] ^ (1 << bit), *base[i + 1 :])) % 2**64) ^ reference).bit_count()
        for i in range(4)
        for bit in range(64)
    ]
    assert 31 < sum(flips) / len(flips) < 33 and min(flips) > 10


def test_order_and_number_of_keys_matter() -> None:
    variants = [(1, 2), (2, 1), (1,), (1, 2, 0), (0, 1, 2), ("1", 2), ("a", "b"), ("ab",)]
    assert len({int(hashed(*variant)) for variant in variants}) == len(variants)


@given(st.integers(0, 2**63), st.integers(0, 200))
def test_a_permutation_holds_every_number_once_and_repeats_with_its_seed(seed: int, n: int) -> None:
    order = permutation((seed, "shuffle"), n)
    assert sorted(order.tolist()) == list(range(n))
    assert order.equal(permutation((seed, "shuffle"), n))
    assert n < 20 or not order.equal(permutation((seed + 1, "shuffle"), n))


def test_random_keys_must_be_integers() -> None:
    with pytest.raises(TypeError, match="integers"):
        hashed(torch.tensor([0.5]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_the_bits_of_the_cpu() -> None:
    rows, columns = torch.arange(-50, 50)[:, None], torch.arange(1000)
    assert hashed(9, "x", rows.cuda(), 4, columns.cuda()).cpu().equal(hashed(9, "x", rows, 4, columns))
    assert uniform(9, columns.cuda()).cpu().equal(uniform(9, columns))
