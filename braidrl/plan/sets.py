"""Sets of roles that share devices: a choice for each role, the offloading that memory requires, the fastest combination.

choices of each role (choices.py) ──in order of seconds──▶ together: residency ──▶ SetChoice, cached by set and size
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
from braidrl.runtimes.memory.budget import at_once, taking_turns
from braidrl.runtimes.memory.residency import PUBLISH

MOST_TRIED = 20_000
"""Most combinations of choices that are tried per set and size; a tenth of this once one fits."""


@dataclass(frozen=True)
class SetChoice:
    """A choice for each role of a set. `budget` limits resident bytes if not everything fits at once."""

    group: NodeGroup
    devices: int
    roles: Mapping[str, Choice]
    costs: Mapping[str, Cost]
    memory: int
    budget: int | None = None

    @cached_property
    def busy(self) -> float:
        """Return the busy seconds of the devices in an iteration."""
        return sum(cost.seconds for cost in self.costs.values())


class Sets:
    """The cached choices of sets of roles; `choices` has those of single roles."""

    def __init__(
        self, problem: Problem, allowed: Callable[[Choice], bool] | None = None, part: RolePart = "all"
    ) -> None:
        """Prepare an empty cache; `allowed` filters choices (named placements), `part` is as in `Choices.of_role`."""
        self.problem, self.part = problem, part
        self.choices = Choices(problem, allowed=allowed)
        self._known: dict[tuple[tuple[str, ...], str, int], SetChoice | None] = {}

    def of_set(self, roles: tuple[str, ...], group: NodeGroup, devices: int) -> SetChoice | None:
        """Return the fastest choices of roles that share these devices; None if they do not fit.

        Combinations are tried in order of seconds without offloading. The search stops once the rest cannot beat the best one, or
        after MOST_TRIED if memory is too tight for that.
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
        """Combine choices on shared devices, with the offloading that memory requires.

        Return None if a single stage does not fit, or if offloading takes at least `limit` seconds.
        """
        room = int(self.problem.kind(group).memory * USABLE)
        working = max(choice.working for choice in roles.values())
        most = at_once([choice.resident for choice in roles.values()], working)
        costs = {name: cost for choice in roles.values() for name, cost in choice.costs.items()}
        if most <= room:
            return SetChoice(group, devices, roles, costs, most)
        if max(choice.largest for choice in roles.values()) + working > room:
            return None
        # Lower bound: the excess is offloaded and loaded at least once.
        if 2 * (most - room) / self._host(group) >= limit:
            return None
        return self.in_turns(roles, group, devices, room - working)

    def in_turns(self, roles: Mapping[str, Choice], group: NodeGroup, devices: int, budget: int) -> SetChoice | None:
        """Return these choices with the moves of a budget of resident bytes; None if a stage alone needs more."""
        problem, working = self.problem, max(choice.working for choice in roles.values())
        generating = [role for role, one in roles.items() if one.use.engine]
        resident = {role: dict(one.resident) for role, one in roles.items()}
        try:
            sizes, plan, peak = taking_turns(problem.flow, resident, generating, budget)
        except UserError:
            return None
        moved = {name: cost for choice in roles.values() for name, cost in choice.costs.items()}
        for step, moves in plan.before.items():
            # Loads before publication are charged to the next generation.
            name = next(iter(moved)) if step == PUBLISH else step
            seconds = sum(sizes[move.asset] for move in moves) / self._host(group)
            if name in moved and seconds:
                moved[name] = moved[name].plus(Cost(moves=seconds))
        return SetChoice(group, devices, roles, moved, peak + working, budget)

    def _host(self, group: NodeGroup) -> float:
        return self.problem.kind(group).host * self.problem.rates_of(group).host


def in_order(options: Sequence[Sequence[Choice]]) -> Iterator[tuple[float, tuple[Choice, ...]]]:
    """Yield every combination of one choice per list, in order of total seconds; each list is sorted by seconds."""
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
