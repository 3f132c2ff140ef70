"""The rows process: makes a run's rows and writes them to files, so that the main process never has their payload.

main process ──make: admission numbers, a held-out set, a checkpoint's file──▶ rows process ──payload──▶ storage
             ◀──index columns, payload locations──────────────────────────────      │
             ──record, keep: index columns, payload locations──▶ rows process ──────┴──read──▶ parquet, checkpoint's file
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from braidrl.config import Config
from braidrl.data.codec import encode
from braidrl.data.rows import Rows
from braidrl.errors import first_line
from braidrl.queue.client import Client, assembled, write_columns
from braidrl.queue.storage import DataPlane
from braidrl.queue.table import StoredRows
from braidrl.runtimes.prepare.setup import with_data, without_data
from braidrl.runtimes.row_store import Admission, HeldOut, Origin, Recording, Surplus
from braidrl.runtimes.saving.background import check_written
from braidrl.runtimes.streaming.control import ControlPlane


def stored(data: DataPlane, rows: Rows) -> StoredRows:
    """Put the payload of rows into storage."""
    return write_columns(data, dict(rows.items()) if len(rows) else {})


def as_order(origin: Origin) -> dict[str, Any]:
    """Encode an origin of rows for a message."""
    match origin:
        case Admission(numbers):
            return {"numbers": list(numbers)}
        case HeldOut(name):
            return {"set": name}
        case Surplus(path):
            return {"file": str(path)}
        case Recording():
            raise ValueError("recorded rows are not streamed")


def origin_of(order: Mapping[str, Any]) -> Origin:
    """Decode an origin of rows."""
    if "numbers" in order:
        return Admission(order["numbers"])
    return HeldOut(order["set"]) if "set" in order else Surplus(Path(order["file"]))


class RowsProcess:
    """The main process's side: sends requests to the process, and repeats them after a restart."""

    def __init__(self, control: ControlPlane, holder: Callable[[], str], wait: Callable[[], None]) -> None:
        """Use the queue for requests.

        Args:
            control: The queue's control plane.
            holder: Returns the process's name at the queue, a new one after each start.
            wait: Waits for a change of the queue, with a short limit; raises the error that ends the run.
        """
        self.control, self.holder, self.wait = control, holder, wait

    def make(self, origin: Origin) -> StoredRows:
        """Return the rows of `origin`, with payload in the queue. Raises UserError if a file is missing."""
        _, made = self._ask({"do": "make", **as_order(origin)})
        assert made is not None
        return made

    def write(self, do: str, path: Path, rows: StoredRows) -> None:
        """Write rows to a file: `record` for people and replays, or `keep` for a checkpoint.

        Raises OSError if the disk is full or gone.
        """
        result, _ = self._ask({"do": do, "path": str(path.resolve()), "payload": rows.payload}, rows)
        check_written(result["trouble"])

    def _ask(self, order: dict[str, Any], rows: StoredRows | None = None) -> tuple[dict[str, Any], StoredRows | None]:
        content = [bytes(frame) for frame in encode(rows.index)] if rows is not None else []
        while True:
            with self.control.changed:
                holder = self.holder()
                given = self.control.give_order(holder, order, content) if holder in self.control.holders else None
            self.control.notify()
            while given is not None and given not in self.control.results and holder in self.control.holders:
                self.wait()
            if given in self.control.results:
                return self.control.results.pop(given)
            self.wait()


def serve_rows(client: Client, config: Config, kept: Mapping[str, Any], wait_s: float) -> None:
    """Make and write rows until the run ends; `kept` are the examples that passed the length limit in the main process."""
    store = with_data(without_data(config), True, kept).store()
    while (work := client.take([], 0, wait_s)).kind != "stop":
        order = work.message
        if work.kind == "order" and order["do"] == "make":
            made = stored(client.data, store.make(origin_of(order)))
            client.ask("ordered", encode(made.index), order=order["order"], result={"payload": made.payload})
        elif work.kind == "order":
            write, trouble = {"record": store.record, "keep": store.save}[order["do"]], ""
            try:
                write(Path(order["path"]), assembled(client.data, work.inline, order["payload"], len(work.inline)))
            except OSError as error:
                trouble = first_line(error)
            client.ask("ordered", order=order["order"], result={"trouble": trouble})
