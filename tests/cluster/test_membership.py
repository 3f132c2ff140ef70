"""The membership of ranks stays one and the same for all, whoever writes the next one first."""

from __future__ import annotations

import random

import torch.distributed as dist

from braidrl.cluster.membership import (
    HOUR_S,
    Members,
    Membership,
    RepairBudget,
    member_name,
    newest,
    note_death,
    propose,
    wait_to_join,
    waiting,
    without,
)


def test_the_first_proposal_for_a_number_is_what_all_read() -> None:
    store, first = dist.HashStore(), Membership(0, ("0.0", "1.0", "2.0"))
    assert newest(store, first) == first
    lost, grown = propose(store, first, ["0.0", "1.0"]), propose(store, first, [*first.members, "3.0"])
    assert lost == grown == newest(store, first) == Membership(1, ("0.0", "1.0"))


def test_random_deaths_and_returns_never_count_a_rank_twice_or_dead() -> None:
    for seed in range(20):
        draw, store, ranks = random.Random(seed), dist.HashStore(), 4
        first = Membership(0, tuple(member_name(rank, 0) for rank in range(ranks)))
        starts, dead, seen = dict.fromkeys(range(ranks), 0), set[str](), [first]
        for _ in range(30):
            known, rank = draw.choice(seen), draw.randrange(ranks)
            living = [member for member in newest(store, known).members if member not in dead]
            if draw.random() < 0.3 and living != [member_name(rank, starts[rank])]:
                dead.add(member := member_name(rank, starts[rank]))
                note_death(store, member)
                starts[rank] += 1
                wait_to_join(store, member_name(rank, starts[rank]))
            elif draw.random() < 0.5:
                seen.append(without(store, known, dead))
                assert dead.isdisjoint(seen[-1].members)
            elif came := waiting(store, known := newest(store, known)):
                seen.append(propose(store, known, [*known.members, *came]))
            ranks_of = [member.split(".")[0] for member in newest(store, known).members if member not in dead]
            assert ranks_of and len(set(ranks_of)) == len(ranks_of)
        assert all(each.members == {one.number: one.members for one in seen}[each.number] for each in seen)


def test_a_launcher_writes_memberships_without_dead_processes_and_with_those_that_wait() -> None:
    store = dist.HashStore()
    ranks = Members(store, ["0.0", "1.0"])
    wait_to_join(store, "2.0")
    ranks.change(["0.0"], ["0.1"])
    assert ranks.membership == newest(store, Membership(0, ("0.0", "1.0"))) == Membership(1, ("1.0", "0.1"))
    assert ranks.waiting() == ["2.0"]
    ranks.lose("2.0")
    assert ranks.waiting() == [] and ranks.membership.number == 1, "it was no member"
    ranks.change()
    assert ranks.membership == Membership(2, ("1.0", "0.1")), "all meet anew"


def test_repairs_beyond_the_budget_of_an_hour_are_refused() -> None:
    budget = RepairBudget(2, "key")
    assert [budget.spend(now) for now in (0.0, 10.0, 20.0)] == [True, True, False]
    assert budget.spend(HOUR_S + 1.0), "the first repair is more than an hour ago"
    assert [budget.spend(HOUR_S + 2.0), budget.spend(HOUR_S + 11.0)] == [False, True]
    assert not RepairBudget(0, "key").spend(0.0)
