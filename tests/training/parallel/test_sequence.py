"""Attention to the keys and values of all context ranks: equal shares of work, and no masks of long rows that are kept
for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from braidrl.training.compute.attention import PackedSequences, Scores
from braidrl.training.parallel import sequence
from braidrl.training.parallel.sequence import EqualShares, ShardedAttention, TokenGroups

LENGTHS = (3, 200, 17)


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


def attended(context: ShardedAttention, scores: Scores) -> tuple[list[Tensor], int]:
    """Return the result of attention and its gradients, and the bytes of what it keeps for the backward pass."""
    generator, kept = torch.Generator().manual_seed(0), dict[int, int]()
    given = [torch.randn(1, heads, sum(LENGTHS), 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = context._attend_to_gathered(given[0], given[1], given[2], scores)
    output.square().sum().backward()
    return [output, *(each.grad for each in given if each.grad is not None)], sum(kept.values())


@pytest.mark.parametrize("window", [None, 9])
def test_long_rows_keep_no_masks_and_have_the_same_gradients(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    context = ShardedAttention(PackedSequences.of(LENGTHS), TokenGroups(alone, alone, alone))
    scores = Scores(scaling=0.3, window=window)
    monkeypatch.setattr(sequence, "QUERIES", 8)
    whole, most = attended(context, scores)
    monkeypatch.setattr(sequence, "LONG", 4)
    again, least = attended(context, scores)
    assert len(whole) == 4 and all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    assert least < 0.6 * most


class Rank:
    """The size of a group of ranks, and a rank of it; nothing is sent."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.size = lambda: rank, lambda: ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 7, 512])
def test_context_ranks_attend_with_all_tokens_and_to_equally_many_keys(ranks: int, count: int) -> None:
    shares = [EqualShares(count, Rank(rank, ranks)) for rank in range(ranks)]  # type: ignore[arg-type]
    tokens = [
        [token for first, size in zip(each.starts, each.sizes, strict=True) for token in range(first, first + size)]
        for each in shares
    ]
    assert sorted(token for part in tokens for token in part) == list(range(ranks * count))
    if count > 1:
        pairs = [sum(token + 1 for token in part) for part in tokens]
        assert max(pairs) <= (1.01 if count == 512 else 1.3) * min(pairs)
    sent = [each._sent for each in shares]
    assert [each._arriving for each in shares] == [list(column) for column in zip(*sent, strict=True)]
