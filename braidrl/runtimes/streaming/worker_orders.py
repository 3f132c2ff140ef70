"""The orders of workers: tasks that they execute between two pieces of work, and the results.

main process ─give─▶ orders of each worker ─next─▶ worker ─OrderDone─▶ done: the result by the order's number

A restarted worker executes its first task, which restores a state, before all other work.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from braidrl.data.messages import Frame
from braidrl.queue.table import StoredRows
from braidrl.runtimes.streaming.work import Order, OrderDone, Task


def group_of(holder: str) -> str:
    """Return a worker's group; after the group's name come the worker's number and its start count."""
    return holder.rsplit(".", 2)[0]


@dataclass
class OrderResult:
    """The result of an order."""

    rows: StoredRows | None = None
    """The rows that an order made."""
    trouble: str = ""
    """The error of a failed write."""


class WorkerOrders:
    """The orders that workers have not executed yet, their results, and the groups whose state is not restored."""

    def __init__(self) -> None:
        self.given = 0
        self.waiting: dict[str, deque[tuple[Order, Sequence[Frame]]]] = {}
        """The orders of each registered worker."""
        self.results: dict[int, OrderResult] = {}
        self.unloaded: frozenset[str] = frozenset()
        """Groups that get no rows until they have loaded a checkpoint or returned to the published version."""
        self.lost_state = ""
        """Why trainers could not return to the published version; empty if they could."""
        self._first_tasks: dict[str, Task] = {}
        """Tasks of workers that have not registered yet, before all other work."""
        self._first_orders: dict[int, str] = {}
        """The groups that are ready for rows after these orders."""

    def join(self, holder: str) -> None:
        """Take in a worker that registers; its first task is its first order."""
        self.waiting[holder] = deque()
        if (task := self._first_tasks.pop(holder, None)) is not None:
            self._first_orders[self.give(holder, task)] = group_of(holder)

    def leave(self, holder: str) -> None:
        """Forget the orders of a worker."""
        self.waiting.pop(holder, None)
        self._first_tasks.pop(holder, None)

    def give(self, holder: str, task: Task, content: Sequence[Frame] = ()) -> int:
        """Give a worker an order; return the number of its result. Raises KeyError for an unknown worker."""
        self.given += 1
        self.waiting[holder].append((Order(number=self.given, task=task), content))
        return self.given

    def give_first(self, tasks: Mapping[str, Task]) -> None:
        """Give workers that have not registered yet their first tasks; until then their groups get no rows."""
        self._first_tasks |= tasks
        self.unloaded |= {group_of(holder) for holder in tasks}

    def next(self, holder: str) -> tuple[Order, Sequence[Frame]] | None:
        """Return a worker's next order with its content."""
        return self.waiting[holder].popleft() if self.waiting[holder] else None

    def done(self, request: OrderDone, rows: StoredRows | None) -> None:
        """Record the result of an order."""
        if (group := self._first_orders.pop(request.number, None)) is None:
            self.results[request.number] = OrderResult(rows, request.trouble)
        elif request.trouble:
            self.lost_state = request.trouble
        else:
            self.unloaded -= {group}

    def withdraw(self) -> None:
        """Forget all orders that workers have not begun."""
        for orders in self.waiting.values():
            orders.clear()
