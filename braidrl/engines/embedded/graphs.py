"""CUDA graphs of decode steps: one launch instead of hundreds, for a model whose layers finish faster than they are
launched.

    rows in the step, positions read ──▶ a graph, recorded the first time ──replay──▶ logits

A graph reads and writes the same addresses each time, so its tensors must not move between generations. When a tensor
has moved (longer rows, other weights), graphs are recorded again. Steps that the recorder refuses, such as those of
experts whose tokens the host counts, run as they are.

Shapes: B slots in the step, V vocabulary.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from braidrl.errors import first_line
from braidrl.training.compute.slots import READ_MULTIPLE, round_up

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""A function that takes a step and returns a function that repeats it on the same addresses; it may run the step while
recording.
"""

logger = logging.getLogger(__name__)


class StepGraphs:
    """Recorded steps by shape."""

    def __init__(self, recorder: Callable[[], Recorder]) -> None:
        """Start without graphs; `recorder` makes a recorder for each set of graphs that read the same tensors."""
        self._recorder, self._record = recorder, recorder()
        self._recordable = True
        self.graphs: dict[tuple[int, int], Callable[[], None]] = {}
        """The graph of each number of rows and of positions read."""
        self._results: dict[int, Tensor] = {}
        self.addresses: tuple[int, ...] = ()
        """The addresses of all tensors that steps read or write; when one has moved, every graph is dropped."""
        self._recorded_addresses: tuple[int, ...] = ()

    def logits(self, rows: int, positions: int, compute: Callable[[int], Tensor]) -> Tensor:
        """Return `compute`'s logits (B, V), reading at least `positions` positions; the next call overwrites them."""
        if self.addresses != self._recorded_addresses:
            self.graphs.clear()
            self._results.clear()
            self._recorded_addresses, self._record = self.addresses, self._recorder()
        # Round up by at most an eighth, to one of 8 lengths between two powers of two, so that few graphs are recorded.
        read = round_up(positions, max(READ_MULTIPLE, 1 << max(0, positions.bit_length() - 4)))
        if (rows, read) not in self.graphs and self._recordable:
            start = time.perf_counter()
            try:
                if rows not in self._results:
                    self._results[rows] = torch.empty_like(compute(read))
                result = self._results[rows]

                def step() -> None:
                    result.copy_(compute(read))

                self.graphs[rows, read] = self._record(step)
                seconds = time.perf_counter() - start
                logger.info("recorded a step of %d rows and %d positions in %.1f s", rows, read, seconds)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._recordable = False
                self.graphs.clear()
                logger.warning(
                    "decode steps of this model cannot be recorded as CUDA graphs and run slower: %s", first_line(error)
                )
        if not self._recordable:
            return compute(read)
        self.graphs[rows, read]()
        return self._results[rows]


class CudaRecorder:
    """Recorder of CUDA graphs that share one memory pool.

    Its pool can outlive them; no graph may be recorded into it then.
    """

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # kernels are chosen and loaded outside of the recording
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return graph.replay
