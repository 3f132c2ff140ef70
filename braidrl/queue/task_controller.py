"""The controller of one consuming task: its ready rows, leases and completed rows. One thread, one socket.

units ──admitted, written, left, lost──▶ ready rows ──take──▶ a client's lease ──done──▶ reported to the units, then answered

It has no state of its own: after a restart it learns the rows and completed work from the units, and the leases from clients.
"""

import secrets
import time
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
"""Key of requests that wait until all units have sent their content."""


@dataclass
class Unit:
    """The state of a storage unit here: its life, the changes read, and reports to send."""

    address: str
    life: int = 0
    heard: int = 0
    finished: bool = False
    done: list[tuple[int, list[Row]]] = field(default_factory=list)
    parts: list[Mapping[str, Any]] = field(default_factory=list)
    freed: list[Block] = field(default_factory=list)
    """Blocks freed by the last changes, which the unit may not know yet."""
    gone: dict[str, None] = field(default_factory=dict)
    """Names of the last freed blocks, for a restarted unit."""
    telling: tuple[int, ...] | None = None
    """Leases with a report under way."""


class TaskController(QueueController):
    """One task's rows. Only its server's thread calls it."""

    def __init__(
        self, name: str, columns: Collection[str], sampler: Sampler, lease_s: float, units: Sequence[str],
        recovers: bool = False, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Begin without rows.

        Args:
            name: Name of the task.
            columns: Columns that a row needs before it is ready.
            sampler: Chooses among ready rows.
            lease_s: Seconds without a heartbeat after which rows go to another client.
            units: Addresses of all storage units.
            recovers: True for the replacement of a killed controller, whose clients may hold rows.
            clock: Returns seconds.
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
        """Completed leases, with their rows, until the unit has confirmed them."""
        self.closed: dict[int, None] = {}
        """The last completed leases, for repeated requests."""
        self.unit_closed: dict[int, None] = {}
        """The completed leases that units named when this controller started."""
        self.waiting_for: set[Any] = set()
        self.quiet_until = clock() + 1.5 * REPEAT_S if recovers else 0.0
        """Until this time clients may still report their leases."""
        self.server: Server

    @property
    def queues(self) -> Collection[Tasks]:
        """Return the single task."""
        return (self.tasks,)

    def begin(self, server: Server) -> None:
        """Follow all units."""
        self.server = server
        for unit in range(len(self.units)):
            self._follow(unit)

    # Requests

    def handle(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Answer one request, once the units' content is known; an unknown client is first asked for its leases."""
        if any(not unit.life for unit in self.units):
            return Wait(HEARD, limited=False)
        if request["request"] != "hello" and request.get("holder") not in self.holders:
            return {"unknown": True}, ()
        return super().handle(request, frames)

    def advance(self) -> None:
        """Wake requests that wait for rows."""
        super().advance()
        for table in self.waiting_for:
            self.server.wake(("rows", table))
        self.waiting_for = set()

    def on_hello(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Register a process, and the leases that it reports."""
        self.holders[request["holder"]] = Holder(request["holder"], request["address"], self.clock())
        for number, names in request["held"]:
            self._claim(number, [row_name(row) for row in names], request["holder"])
        return {}, ()

    def on_take(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Lease ready rows; answer `stop` when all rows are done and no more will come."""
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
                "kind": "rows", "consumer": self.name, "lease": lease.number, "size": len(lease.rows), "rows": lease.rows,
                "payload": self.rows.table.columns(lease.rows, columns), "lost": lost,
            }, ()  # fmt: skip
        if all(unit.finished for unit in self.units) and not any(self.task.undone.values()):
            return {"kind": "stop", "lost": lost}, ()
        if lost:
            return {"kind": "lost", "lost": lost}, ()
        self.waiting_for.add(table)
        return Wait(("rows", table))

    def on_done(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Record completed leases, with the columns written for their rows; return the lost ones.

        The answer waits until the units know: until then the client may repeat the request to a replacement of this controller.
        """
        lost = []
        for number in request["leases"]:
            if number in self.closing or number in self.closed:
                continue
            try:
                self._finish(number, self.tasks.complete(number, self.clock()), request["parts"])
            except LeaseLost:
                lost.append(number)
        for number in request["leases"]:
            if number in self.closing:
                return Wait(("closed", number), limited=False)
        return {"lost": lost}, ()

    def on_usage(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Return the number of remaining rows, and how many each holder has."""
        return {"undone": sum(self.task.undone.values()), "held": list(self.tasks.leases.rows_of.items())}, ()

    def tick(self) -> None:
        """Release expired leases, and lease rows again once clients have had time to report."""
        with self.changed:
            now = self.clock()
            ended, was_quiet = self.tasks.give_up(self.tasks.leases.expired(now)), self.quiet_until
            if was_quiet <= now:
                self.quiet_until = 0.0
            if ended or self.quiet_until < was_quiet:
                self.advance()

    def _claim(self, number: int, rows: Sequence[Row], holder: str) -> None:
        """Restore a lease that a client reports, unless it is done or another client has its rows."""
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
        # Requested at once: the request tells the unit that its changes are known here too.
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
            self.rows.admit(number, [row_name(row) for row in change["rows"]], change)
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
        """Report completed rows to their unit."""
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
            self.server.calls.ask(("tell", number), unit.address, request, (), partial(self._reported, number))

    def _reported(self, number: int, answer: dict[str, Any]) -> None:
        if "error" in answer:
            raise RuntimeError(f"{self.units[number].address}: {answer['error']}")
        for lease in self.units[number].telling or ():
            del self.closing[lease]
            remember(self.closed, lease, CLOSED)
            self.server.wake(("closed", lease))
        self.units[number].telling = None
        self._tell(number)

    def _held(self, number: int) -> dict[str, Any]:
        """Return everything known of a unit, for the unit's restart."""
        unit = self.units[number]
        # Unconfirmed reports are sent again, with what was written.
        closing = [[lease, many] for lease, many in self.closing.items() if home(many[0], len(self.units)) == number]
        changes, done = self.rows.of_unit(number)
        return {
            "request": "hold", "task": self.name, "changes": changes,
            "done": [[lease, row] for lease, row in done if lease not in self.closing], "finished": unit.finished,
            "life": unit.life, "heard": unit.heard, "closed": [*self.unit_closed, *self.closed],
            "closing": closing, "freed": unit.freed, "gone": list(unit.gone),
        }  # fmt: skip
