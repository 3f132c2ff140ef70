"""Virtual time: events in the order in which they fall due, with no waiting between them."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Runs actions at their times; those of one time run in the order in which they were asked for."""

    now: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    asked: int = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Asks for `action` in `seconds` from now."""
        heapq.heappush(self.events, (self.now + seconds, self.asked, action))
        self.asked += 1

    def step(self) -> bool:
        """Runs the next event; False if there is none."""
        if not self.events:
            return False
        self.now, _, action = heapq.heappop(self.events)
        action()
        return True
