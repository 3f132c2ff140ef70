"""What stages take of this process's device: memory at its peak, and what share of its rates they reach; added to their metrics.

rows ──operations──▶ over seconds · operations per second    training and inference: model-FLOPs utilisation
rows ──bytes───────▶ over seconds · bytes per second         generation: decode bandwidth utilisation

A share travels as its two sums, so that over processes, and devices of several kinds, it is all that was done over all that could be.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from braidrl.agents.player import Episode
from braidrl.cluster.devices import choose_device
from braidrl.cluster.process import default_threads
from braidrl.config import Config
from braidrl.data.rows import Rows
from braidrl.engines.factory import engine_processes, generation_layout, pools_ranks
from braidrl.engines.requests import Response
from braidrl.flow import Kind, Stage
from braidrl.observe.metrics import Sums
from braidrl.training import operations
from braidrl.training.backends import TrainingBackend
from braidrl.training.device_rates import DeviceRates, own_rates
from braidrl.training.memory.footprint import model_shape
from braidrl.training.operations import MatrixSizes, TokenCounts, decoding
from braidrl.training.role_settings import DTYPES, dtype_of, model_path
from braidrl.training.roles.base import RoleWorker
from braidrl.training.roles.make import ScalarWorker


class Drawn(NamedTuple):
    """What engines have drawn of a row: how many tokens, and how many each of these has seen before it, added up."""

    tokens: int
    seen: int

    @staticmethod
    def of(prompt: Tensor, ended: Response | Episode) -> "Drawn":
        """Return what was drawn after a prompt, or in all turns of an episode."""
        if isinstance(ended, Response):
            return Drawn(len(ended.tokens), operations.tokens_seen(len(prompt), len(ended.tokens)))
        return Drawn._of_episode(ended)

    @staticmethod
    def _of_episode(episode: Episode) -> "Drawn":
        actions = np.array(episode.trajectory.actions, dtype=bool)
        lengths = np.array(episode.trajectory.sequence_lengths, dtype=np.int64)
        places = np.arange(len(actions)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return Drawn(int(actions.sum()), int(places[actions].sum()))


class Engines(NamedTuple):
    """Copies of a model that decode for this process, the ranks that divide one among them, and the bytes per second that it reaches."""

    copies: int
    ranks: int
    bandwidth: float


class DeviceUsage:
    """Adds to the metrics of stages what they take of the device of this process."""

    def __init__(self, config: Config) -> None:
        self.config, self.device = config, choose_device(config.device)
        self.threads = torch.get_num_threads()
        self._sizes: dict[str, MatrixSizes] = {}

    @cached_property
    def rates(self) -> DeviceRates | None:
        """Return what this process can reach, None where nobody knows it."""
        return own_rates(self.device, self.threads)

    @contextmanager
    def memory_of(self, stage: Stage, sums: Sums) -> Iterator[None]:
        """Add the most memory that the block takes."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        yield
        self.note_memory(stage, sums)

    def note_memory(self, stage: Stage, sums: Sums) -> None:
        """Add the most memory since `memory_of` began, or since ever; of a stage without a model nothing is said."""
        if stage.kind not in (Kind.GENERATE, Kind.INFER, Kind.TRAIN):
            return
        if self.device.type == "cuda":
            sums.highest(f"memory/{stage.name}/allocated_max", torch.cuda.max_memory_allocated())
            sums.highest(f"memory/{stage.name}/reserved_max", torch.cuda.max_memory_reserved())
        else:
            sums.highest(f"memory/{stage.name}/resident_max", psutil.Process().memory_info().rss)

    @contextmanager
    def computing(self, stage: Stage, worker: TrainingBackend, sums: Sums, *passes: Rows) -> Iterator[None]:
        """Add what share of the device's operations per second the block reaches.

        Args:
            stage: An infer or train stage.
            worker: The role's; what one of a user's own computes nobody knows.
            sums: Where the share is added.
            passes: Rows that go through the model, forward and in a train stage backward; none where the optimizer makes its step.
        """
        start = time.perf_counter()
        yield
        if not isinstance(worker, RoleWorker) or self.rates is None:
            return
        peak = self.rates.operations.get(str(worker.dtype).removeprefix("torch."))
        if peak:
            done = sum(self._operations(stage, worker, rows) for rows in passes if len(rows))
            sums.add(f"utilisation/operations/{stage.name}", done, (time.perf_counter() - start) * peak)

    def _operations(self, stage: Stage, worker: RoleWorker, rows: Rows) -> float:
        sizes = self._sizes_of(worker.role, isinstance(worker, ScalarWorker))
        counts = TokenCounts.of(rows, worker.shares_prompts(rows))
        if stage.kind is Kind.TRAIN:
            return operations.training_operations(sizes, counts, frozen=worker.lora is not None)
        return operations.forward_operations(sizes, counts)

    def _sizes_of(self, role: str, scalar: bool = False) -> MatrixSizes:
        if role not in self._sizes:
            shape = model_shape(model_path(role, self.config).expanduser(), dtype_of(role, self.config), scalar)
            self._sizes[role] = MatrixSizes.of(shape.sizes, shape.parameters, scalar)
        return self._sizes[role]

    def decoded(
        self, stage: Stage, drawn: Sequence[Drawn], slots: int, seconds: float, sums: Sums, crowd: int | None = None
    ) -> None:
        """Add what share of its memory's bandwidth decoding has reached.

        Args:
            stage: A generate stage.
            drawn: What its engines have drawn.
            slots: Rows that they decode at once.
            seconds: How long they took.
            sums: Where the share is added.
            crowd: Of rows that others have taken turns with, the most that were under way at once; None where these were alone.
        """
        engines = self._engines()
        if engines is None or not (drawn := [row for row in drawn if row.tokens]):
            return
        tokens, seen = zip(*drawn, strict=True)
        own_slots = max(1, slots // engines.ranks)
        steps = decoding(np.array(tokens), own_slots).steps if crowd is None else sum(tokens) / crowd
        role, dtype = str(stage.role), self.config.rollout.dtype
        element_bytes = (DTYPES[dtype] if dtype else dtype_of(role, self.config)).itemsize
        read = operations.decoding_bytes(
            self._sizes_of(role), element_bytes, steps * engines.copies / engines.ranks, sum(seen)
        )
        sums.add(f"utilisation/bandwidth/{stage.name}", read, seconds * engines.bandwidth)

    def _engines(self) -> Engines | None:
        """Return what generates for this process; None where its rates are not known."""
        config = self.config
        if config.rollout.engine == "http" or self.rates is None:
            return None
        if not (count := engine_processes(config)):
            ranks = generation_layout(config).ranks if pools_ranks(config) else 1
            return Engines(1, ranks, self.rates.bandwidth)
        processes = count * config.rollout.tensor
        threads = default_threads(processes) or int(os.environ["OMP_NUM_THREADS"])
        each = own_rates(self.device, threads)
        return None if each is None else Engines(count, 1, processes * each.bandwidth)
