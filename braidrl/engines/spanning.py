"""Engines over several nodes: the first node starts an engine, and each other node adds its part to that start.

node 0   EngineProcess: scheduler, ranks 0 to 7 ──"start 2 is at 10.0.0.1:4711"──▶ store   the engine that the run calls
node 1   EngineProcess: ranks 8 to 15 ◀────────── joins start 2, reports its loss ──┘      no call reaches it

vLLM's own executor for several nodes connects the parts. When one is lost the engine ends, and all nodes join its next
start.
"""

import asyncio
import contextlib
import socket
from dataclasses import dataclass, replace

import torch.distributed as dist

from braidrl.cluster.process_groups import has_message, message_at, put_message
from braidrl.engines.engine import NodePart
from braidrl.training.parallel.layouts import DataParallel

LOOK_S = 0.2
"""Seconds between two looks at the store."""
END = "end"
"""The key that is set when the engine is closed."""


@dataclass
class SpanningEngine:
    """An engine over several nodes, as seen by one of them."""

    store: dist.Store
    """Shared by all nodes of this engine, and used only by them."""
    part: NodePart
    """This node's part; node 0 starts the engine."""
    start: int = 0
    """The number of the current start."""

    def begin(self) -> NodePart:
        """Announce the next start, and return the first node's part in it."""
        with socket.create_server((self.part.address, 0)) as free:
            port = free.getsockname()[1]
        self.start += 1
        put_message(self.store, f"start/{self.start}", [self.part.address, port])
        return replace(self.part, host=self.part.address, port=port)

    def lost(self) -> int | None:
        """Return a node that has lost its part of the current start; None while all nodes have theirs."""
        other_nodes = range(1, self.part.nodes)
        return next((node for node in other_nodes if has_message(self.store, f"lost/{self.start}/{node}")), None)

    def end(self) -> None:
        """Notify the other nodes that there will be no further start."""
        # Without the store the run has ended, and the other nodes with it.
        with contextlib.suppress(RuntimeError):
            put_message(self.store, END)

    async def next_start(self) -> NodePart | None:
        """Wait for the next start, and return this node's part in it; None at the end."""
        while not self.is_over():
            await asyncio.sleep(LOOK_S)
        if not has_message(self.store, f"start/{self.start + 1}"):
            return None
        self.start += 1
        host, port = message_at(self.store, f"start/{self.start}", tuple[str, int])
        return replace(self.part, host=host, port=port)

    def is_over(self) -> bool:
        """Return True if the first node has abandoned the current start."""
        return has_message(self.store, END) or has_message(self.store, f"start/{self.start + 1}")

    def lose(self) -> None:
        """Report that this node has lost its part of the current start."""
        put_message(self.store, f"lost/{self.start}/{self.part.node}")


@dataclass(frozen=True)
class OneOf(DataParallel):
    """One of several workers that generate for a role; an engine may span several nodes, a process on each."""

    rank: int = 0
    size: int = 1
    spanning: SpanningEngine | None = None
    """This process's node of the worker, with a store that its processes share; None if the worker has one process."""
