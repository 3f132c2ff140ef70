"""Put roles together on the devices that they share: a choice for each, the moves that memory asks for, the soonest combination.

choices of each role (choices.py) ──in the order of their seconds──▶ together: residency ──▶ SetChoice, kept for each set and size
"""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from braidrl.cluster.device_kinds import NodeGroup
from braidrl.errors import UserError
from braidrl.plan.choices import Choice, Choices, RolePart
from braidrl.plan.problem import USABLE, Problem
from braidrl.plan.rates import Cost
from braidrl.runtimes.memory.budget import asleep, assets, at_once
from braidrl.runtimes.memory.residency import PUBLISH, residency_plan

MOST_TRIED = 20_000
"""Combinations of roles' choices that are looked at for one set on so many devices; a tenth of them once one has room."""


@dataclass(frozen=True)
class SetChoice:
    """A choice for each role of a set that shares devices. `budget` is what may be resident at a time, where not all has room."""

    group: NodeGroup
    devices: int
    roles: Mapping[str, Choice]
    costs: Mapping[str, Cost]
    memory: int
    budget: int | None = None

    @cached_property
    def busy(self) -> float:
        """Return the seconds that the devices work in an iteration."""
        return sum(cost.seconds for cost in self.costs.values())


class Sets:
    """The choices of a problem's sets of roles, each computed once; `choices` has those of the roles."""

    def __init__(
        self, problem: Problem, allowed: Callable[[Choice], bool] | None = None, part: RolePart = "all"
    ) -> None:
        """Args: `allowed` which choices may be taken, where a named placement has not all of them; `part` what sets consist of."""
        self.problem, self.part = problem, part
        self.choices = Choices(problem, allowed=allowed)
        self._known: dict[tuple[tuple[str, ...], str, int], SetChoice | None] = {}

    def of_set(self, roles: tuple[str, ...], group: NodeGroup, devices: int) -> SetChoice | None:
        """Return the choices of roles that share so many devices with which these are done soonest; None where there is no room.

        Combinations come in the order of their seconds; once one needs no moves, or all that follow take longer than the best one with
        its moves, the rest is cut. Where memory is so tight that it is not cut, the first MOST_TRIED are looked at.
        """
        key = (roles, group.kind, devices)
        if key not in self._known:
            self._known[key] = self._soonest(roles, group, devices)
        return self._known[key]

    def _soonest(self, roles: tuple[str, ...], group: NodeGroup, devices: int) -> SetChoice | None:
        options = [self.choices.of_role(role, group, devices, self.part) for role in roles]
        quickest: SetChoice | None = None
        for tried, (busy, picked) in enumerate(in_order(options)):
            if tried >= MOST_TRIED or (quickest is not None and (busy >= quickest.busy or tried >= MOST_TRIED // 10)):
                break
            limit = quickest.busy - busy if quickest else math.inf
            found = self.together(dict(zip(roles, picked, strict=True)), group, devices, limit)
            if found is not None and (quickest is None or found.busy < quickest.busy):
                quickest = found
        return quickest

    def together(
        self, roles: Mapping[str, Choice], group: NodeGroup, devices: int, limit: float = math.inf
    ) -> SetChoice | None:
        """Return these choices side by side, with the moves that memory asks for.

        None where a stage alone has no room, and where the moves take more than `limit` seconds for certain.
        """
        room = int(self.problem.kind(group).memory * USABLE)
        working = max(choice.working for choice in roles.values())
        most = at_once([choice.resident for choice in roles.values()], working)
        costs = {name: cost for choice in roles.values() for name, cost in choice.costs.items()}
        if most <= room:
            return SetChoice(group, devices, roles, costs, most)
        if max(choice.largest for choice in roles.values()) + working > room:
            return None
        # What has no room leaves and comes back at least once.
        if 2 * (most - room) / self._host(group) >= limit:
            return None
        return self._in_turns(roles, costs, group, devices, room - working, working)

    def _in_turns(
        self,
        roles: Mapping[str, Choice],
        costs: Mapping[str, Cost],
        group: NodeGroup,
        devices: int,
        budget: int,
        working: int,
    ) -> SetChoice | None:
        problem = self.problem
        sizes = {a: size for role, one in roles.items() for a, size in assets(role, dict(one.resident)).items()}
        shared = frozenset(r for r, one in roles.items() if one.use.engine and not one.use.engine.own_weights)
        copied = frozenset(r for r, one in roles.items() if one.use.inference is not None)
        sleeping = {a: size for role, one in roles.items() for a, size in asleep(role, dict(one.resident)).items()}
        try:
            plan = residency_plan(problem.flow, sizes, budget, shared, copied, sleeping)
        except UserError:
            return None
        moved = dict(costs)
        for step, moves in plan.before.items():
            # What is brought for publication is the trainers'; the engines' next stage pays for it.
            name = next(iter(costs)) if step == PUBLISH else step
            seconds = sum(sizes[move.asset] for move in moves) / self._host(group)
            if name in moved and seconds:
                moved[name] = moved[name].plus(Cost(moves=seconds))
        return SetChoice(group, devices, roles, moved, budget + working, budget)

    def _host(self, group: NodeGroup) -> float:
        return self.problem.kind(group).host * self.problem.rates_of(group).host


def in_order(options: Sequence[Sequence[Choice]]) -> Iterator[tuple[float, tuple[Choice, ...]]]:
    """Yield every combination of one choice from each list, in the order of their seconds together; the lists are in that order."""
    if not all(options):
        return
    first = (0,) * len(options)
    waiting = [(sum(own[0].busy for own in options), first)]
    seen = {first}
    while waiting:
        busy, places = heapq.heappop(waiting)
        yield busy, tuple(own[place] for own, place in zip(options, places, strict=True))
        for i, own in enumerate(options):
            later = (*places[:i], places[i] + 1, *places[i + 1 :])
            if later[i] < len(own) and later not in seen:
                seen.add(later)
                heapq.heappush(waiting, (sum(o[p].busy for o, p in zip(options, later, strict=True)), later))
