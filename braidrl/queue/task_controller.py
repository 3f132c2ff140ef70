"""The controller of one consuming task: which rows it can take, who holds them, what it is done with. One thread, one socket.

units ──born, written, left, lost──▶ what is ready ──take──▶ a client's lease ──done──▶ told to the units, then answered

It owns nothing that others do not know: one that is started again learns from the units which rows there are and which the task is
done with, and from clients which leases they hold.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from braidrl.data.frames import Frame
from braidrl.queue.calls import Server
from braidrl.queue.changes import CLOSED, GONE, remember
from braidrl.queue.requests import Answer, Holder, QueueController, Wait
from braidrl.queue.samplers import Sampler
from braidrl.queue.table import Block, Row, home, row_name
from braidrl.queue.task_rows import TaskRows
from braidrl.queue.tasks import LeaseLost, Tasks
from braidrl.queue.transport import REPEAT_S

HEARD = "heard"
"""What waits until all units have said what they hold."""


@dataclass
class Unit:
    """What is known of a storage unit: how much of which life was heard, and what it is to be told."""

    address: str
    life: int = 0
    heard: int = 0
    finished: bool = False
    done: list[tuple[int, list[Row]]] = field(default_factory=list)
    parts: list[Mapping[str, Any]] = field(default_factory=list)
    freed: list[Block] = field(default_factory=list)
    """Blocks that have left by what was heard last, which the unit may not know yet."""
    gone: dict[str, None] = field(default_factory=dict)
    """The names of the last blocks that have left, which the unit must know when it is started again."""
    telling: tuple[int, ...] | None = None
    """Leases of which it is being told."""


class TaskController(QueueController):
    """One task's rows. Everything is called by its server's thread."""

    def __init__(
        self, name: str, columns: Collection[str], sampler: Sampler, lease_s: float, units: Sequence[str],
        recovers: bool = False, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Begin without rows.

        Args:
            name: the task.
            columns: those that a row must have to be given to it.
            sampler: which of the ready rows are given next.
            lease_s: seconds without a sign of life after which rows are given to another.
            units: the addresses of all storage units.
            recovers: it replaces one that was killed, whose clients may hold rows.
            clock: returns seconds.
        """
        super().__init__(lease_s, clock)
        self.name, self.sampler = name, sampler
        self.rows = TaskRows(name, columns)
        self.tasks, self.task = self.rows.tasks, self.rows.task
        # A lease of an earlier life of this controller has another number.
        self.tasks.leases.numbers = count(secrets.randbits(40) << 20)
        self.units = [Unit(address) for address in units]
        self.holders: dict[str, Holder] = {}
        self.closing: dict[int, list[Row]] = {}
        """Leases that are done, with their rows, until the unit has confirmed it."""
        self.closed: dict[int, None] = {}
        """The last leases that are done, for clients that ask again."""
        self.unit_closed: dict[int, None] = {}
        """Those of which a unit has said so when this controller came to know it."""
        self.waiting_for: set[Any] = set()
        self.quiet_until = clock() + 1.5 * REPEAT_S if recovers else 0.0
        """Until when clients have time to say what they hold."""
        self.server: Server

    @property
    def queues(self) -> Collection[Tasks]:
        """Return the one task's."""
        return (self.tasks,)

    def begin(self, server: Server) -> None:
        """Follow all units."""
        self.server = server
        for unit in range(len(self.units)):
            self._follow(unit)

    # Requests

    def handle(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Answer one request, once it is known what the units hold; of a client that is not known ask first what it holds."""
        if any(not unit.life for unit in self.units):
            return Wait(HEARD, limited=False)
        if request["request"] != "hello" and request.get("holder") not in self.holders:
            return {"unknown": True}, ()
        return super().handle(request, frames)

    def advance(self) -> None:
        """Wake who waits for rows."""
        super().advance()
        for table in self.waiting_for:
            self.server.wake(("rows", table))
        self.waiting_for = set()

    def on_hello(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note a process that is there, and the leases that it says it holds."""
        self.holders[request["holder"]] = Holder(request["holder"], request["address"], self.clock())
        for number, names in request["held"]:
            self._claim(number, [row_name(row) for row in names], request["holder"])
        return {}, ()

    def on_take(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Lease rows that are ready; of kind `stop` when all rows are done and no more will come."""
        lost, table = self.lost(request["held"]), request.get("table")
        lease = None
        if not self.quiet_until:
            lease = self.tasks.take(
                self.name, request["holder"], self.clock(), self.lease_s, request["most"], self.sampler,
                request["ranks"], self.rows.place(table),
            )  # fmt: skip
        if lease is not None:
            columns = request.get("columns") or sorted(self.rows.columns)
            return {
                "kind": "rows", "stage": self.name, "leases": [[lease.number, len(lease.rows)]], "rows": lease.rows,
                "payload": self.rows.table.columns(lease.rows, columns), "lost": lost, "state": {}, "iteration": 0,
            }, ()  # fmt: skip
        if all(unit.finished for unit in self.units) and not any(self.task.undone.values()):
            return {"kind": "stop", "lost": lost}, ()
        if lost:
            return {"kind": "lost", "lost": lost}, ()
        self.waiting_for.add(table)
        return Wait(("rows", table))

    def on_done(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Note leases that are done, with the columns that were written for their rows; return those that were lost.

        It is answered when the units know: until then it may be asked again, of whoever replaces this controller.
        """
        lost = []
        for number in request["leases"]:
            if number in self.closing or number in self.closed:
                continue
            try:
                self._finish(number, self.tasks.acknowledge(number, self.clock()).rows, request["parts"])
            except LeaseLost:
                lost.append(number)
        for number in request["leases"]:
            if number in self.closing:
                return Wait(("closed", number), limited=False)
        return {"lost": lost}, ()

    def on_give_back(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Free the rows of leases that their holder can do nothing with."""
        held = self.tasks.leases.held
        self.tasks.give_up([held[number] for number in request["leases"] if number in held])
        return {}, ()

    def on_usage(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Return how many rows are left to do, and who holds how many of them."""
        held = Counter(lease.holder for lease in self.tasks.leases.held.values() for _ in lease.rows)
        return {"undone": sum(self.task.undone.values()), "held": list(held.items())}, ()

    def tick(self) -> None:
        """Free what has been held for too long, and give rows again when clients have had time to speak."""
        with self.changed:
            now = self.clock()
            ended, was_quiet = self.tasks.give_up(self.tasks.leases.expired(now)), self.quiet_until
            if was_quiet <= now:
                self.quiet_until = 0.0
            if ended or self.quiet_until < was_quiet:
                self.advance()

    def _claim(self, number: int, rows: Sequence[Row], holder: str) -> None:
        """Give a client back the lease that it says it holds, unless it is done or its rows are another's by now."""
        known = [row for row in rows if row in self.tasks.rows]
        if number in self.unit_closed or (known and all(self.rows.done_by.get(row) == number for row in known)):
            remember(self.closed, number, CLOSED)
        elif number not in self.tasks.leases.held and rows and self.rows.are_free(rows):
            self.tasks.lease(self.name, rows, holder, self.clock(), self.lease_s, number)

    # What units say

    def _follow(self, number: int) -> None:
        unit = self.units[number]
        request = {"request": "follow", "task": self.name, "since": unit.heard, "life": unit.life}
        self.server.calls.ask(("follow", number), unit.address, request, (), partial(self._hear, number))

    def _hear(self, number: int, answer: dict[str, Any]) -> None:
        unit = self.units[number]
        if "tell" in answer:
            self.server.calls.ask(
                ("follow", number), unit.address, self._held(number), (), lambda _: self._follow(number)
            )
            return
        unit.life, unit.heard = answer["life"], answer["heard"]
        # Asked at once: by this the unit knows that its changes are known here too.
        self._follow(number)
        with self.changed:
            unit.freed = []
            if answer.get("all"):
                self.rows.compare(number, answer["changes"])
                unit.finished = answer["finished"]
            for change in answer["changes"]:
                self._note(number, change)
            for name in answer.get("gone", ()):
                remember(unit.gone, name, GONE)
            for lease in answer.get("closed", ()):
                remember(self.unit_closed, lease, CLOSED)
            for lease, row in answer.get("done", ()):
                self.rows.learn_done(row_name(row), lease)
            self.server.wake(HEARD)
            self.advance()

    def _note(self, number: int, change: Mapping[str, Any]) -> None:
        kind, unit = change["kind"], self.units[number]
        if kind == "written":
            self.rows.write(number, change)
        elif kind == "born":
            self.rows.bear(number, [row_name(row) for row in change["rows"]], change)
        elif kind == "left":
            freed = self.rows.leave([row_name(row) for row in change["rows"]])
            unit.freed += freed
            for block in freed:
                remember(unit.gone, block.name, GONE)
        elif kind == "lost":
            rows = [row for row in map(row_name, change["rows"]) if row in self.tasks.rows]
            self.rows.lose(rows, change["columns"], change["by"])
        else:
            unit.finished = True

    # What units are told

    def _finish(self, lease: int, rows: Sequence[Row], parts: Sequence[Mapping[str, Any]]) -> None:
        """Have the unit of some rows told that they are done."""
        number = home(rows[0], len(self.units))
        for row in rows:
            self.rows.done_by[row] = lease
        self.closing[lease] = list(rows)
        self.units[number].done.append((lease, list(rows)))
        self.units[number].parts += [{**part, "by": self.name} for part in parts]
        self._tell(number)

    def _tell(self, number: int) -> None:
        unit = self.units[number]
        if unit.telling is None and unit.done:
            request = {"request": "done", "task": self.name, "done": unit.done, "parts": unit.parts}
            unit.telling, unit.done, unit.parts = tuple(lease for lease, _ in unit.done), [], []
            self.server.calls.ask(("tell", number), unit.address, request, (), partial(self._told, number))

    def _told(self, number: int, answer: dict[str, Any]) -> None:
        if "error" in answer:
            raise RuntimeError(f"{self.units[number].address}: {answer['error']}")
        for lease in self.units[number].telling or ():
            del self.closing[lease]
            remember(self.closed, lease, CLOSED)
            self.server.wake(("closed", lease))
        self.units[number].telling = None
        self._tell(number)

    def _held(self, number: int) -> dict[str, Any]:
        """Return all that is known of a unit, for one that was started again."""
        unit = self.units[number]
        # What is not confirmed is told again, with what was written.
        closing = [[lease, many] for lease, many in self.closing.items() if home(many[0], len(self.units)) == number]
        changes, done = self.rows.of_unit(number)
        return {
            "request": "hold", "task": self.name, "changes": changes,
            "done": [[lease, row] for lease, row in done if lease not in self.closing], "finished": unit.finished,
            "life": unit.life, "heard": unit.heard, "closed": [*self.unit_closed, *self.closed],
            "closing": closing, "freed": unit.freed, "gone": list(unit.gone),
        }  # fmt: skip
