"""Workers as whoever starts them sees them: processes of this machine, or actors on the nodes of a Ray cluster.

Launcher ──reserve──▶ room ──start──▶ Worker: works ──▶ has ended, has raised, was killed
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from braidrl.errors import UserError, WorkerError
from braidrl.placement.pools import Pool

END_LIMIT_S = 10.0
"""How long workers have to end by themselves before they are killed."""

Arguments = Mapping[str, Any]
Main = Callable[[Arguments], None]
RankFailure = Mapping[str, str]
"""What a worker raised: `kind` (user or worker) and `text`."""


class WorkerFailed(WorkerError):
    """A worker raised; the text holds its own traceback."""


def failure_of(main: Main, arguments: Arguments) -> RankFailure | None:
    """Does a worker's work, in its process; what it raised."""
    try:
        main(arguments)
    except UserError as error:
        return {"kind": "user", "text": str(error)}
    except BaseException:
        return {"kind": "worker", "text": traceback.format_exc()}
    return None


class Worker(ABC):
    """One process that runs `main(arguments)`, both of which must be importable or plain data."""

    name: str

    @property
    @abstractmethod
    def pid(self) -> int:
        """Its process, on its machine."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """True while it works."""

    @property
    @abstractmethod
    def failure(self) -> RankFailure | None:
        """What it raised; None for one that works, ended or was killed."""

    @abstractmethod
    def describe_end(self) -> str:
        """Why it is gone, in a few words."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it at once and waits until it is gone."""

    @abstractmethod
    def close(self, limit_s: float = END_LIMIT_S) -> None:
        """Waits until it has ended, and kills it when that takes too long."""

    def raise_failure(self) -> None:
        """Raises what the process raised: UserError for a user's mistake, WorkerFailed with its traceback for all else."""
        failure = self.failure
        if failure is not None:
            if failure["kind"] == "user":
                raise UserError(failure["text"])
            raise WorkerFailed(f"{self.name} failed:\n{failure['text']}")


class Launcher(Protocol):
    """Starts workers."""

    @property
    def ip(self) -> str:
        """Where the workers reach this process."""

    @property
    def node(self) -> str:
        """The name of this process's node."""

    def reserve(self, pools: Sequence[Pool]) -> int | None:
        """Sees to room for all workers; the threads of each, None where the cluster sees to that.

        Raises UserError where there is too little.
        """

    def serve(self, service: type) -> list[Any]:
        """Makes `service(node, ip)` on every reserved node but this one, and closes it in the end; what `place()` of each is."""

    def start(
        self, pool: str, number: int, main: Main, arguments: Callable[[str], Arguments], orphaned: Main | None
    ) -> Worker:
        """A worker of a pool; its arguments follow from its node.

        `orphaned(arguments)` runs there when this process is gone, just before the worker ends too.
        """

    def close(self) -> None:
        """Leaves nothing of what was started."""
