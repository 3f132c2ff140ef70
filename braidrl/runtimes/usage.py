"""Device usage of stages: peak memory and utilisation, added to their metrics.

rows ──operations──▶ over seconds · operations per second    training and inference: model-FLOPs utilisation
rows ──bytes───────▶ over seconds · bytes per second         generation: decode bandwidth utilisation

A share is sent as two sums, so that the total over processes and device kinds is all work done over all work possible.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from braidrl.agents.trajectory import Trajectory
from braidrl.cluster.devices import choose_device
from braidrl.config import Config
from braidrl.data.rows import Rows
from braidrl.engines.deployment import Engines
from braidrl.engines.engine import Speculated
from braidrl.engines.requests import Response
from braidrl.flow import Stage
from braidrl.observe.metrics import Sums
from braidrl.training import operations
from braidrl.training.backends import TrainingBackend
from braidrl.training.decoders.images import ModelImages
from braidrl.training.memory.footprint import model_shape
from braidrl.training.operations import DeviceRates, MatrixSizes, TokenCounts, decoding, device_rates
from braidrl.training.role_settings import dtype_named, settings_of
from braidrl.training.roles.worker import RoleWorker


class Drawn(NamedTuple):
    """Numbers of generated tokens (B,), and sums (B,) of the context lengths at which they were generated."""

    tokens: NDArray[np.int64]
    seen: NDArray[np.int64]

    @staticmethod
    def after(prompts: Sequence[int], drawn: Sequence[Response]) -> "Drawn":
        """Return the tokens generated after prompts of these lengths."""
        tokens = np.array([len(response.tokens) for response in drawn], dtype=np.int64)
        return Drawn(tokens, tokens * np.array(prompts, dtype=np.int64) + tokens * (tokens - 1) // 2)

    @staticmethod
    def played(trajectories: Sequence[Trajectory]) -> "Drawn":
        """Return the tokens generated in all turns of trajectories."""
        tokens, attended = np.zeros((2, len(trajectories)), dtype=np.int64)
        for row, trajectory in ((row, t) for row, episode in enumerate(trajectories) for t in episode.every):
            actions, lengths = (
                np.array(trajectory.actions, dtype=bool),
                np.array(trajectory.sequence_lengths, dtype=np.int64),
            )
            positions = np.arange(len(actions)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            tokens[row] += actions.sum()
            attended[row] += positions[actions].sum()
        return Drawn(tokens, attended)

    @staticmethod
    def cat(parts: "Sequence[Drawn]") -> "Drawn":
        """Concatenate the rows of all parts."""
        return Drawn(np.concatenate([part.tokens for part in parts]), np.concatenate([part.seen for part in parts]))


class DeviceUsage:
    """Adds this process's device usage to the metrics of stages."""

    def __init__(self, config: Config, engines: Engines) -> None:
        self.config, self.engines, self.device = config, engines, choose_device(config.device)
        self.threads = torch.get_num_threads()
        self._sizes: dict[str, MatrixSizes] = {}
        self._speculated: dict[str | None, Speculated] = {}
        """By role the counts of its engine at the end of the last generate stage."""
        self._encoded = WeakKeyDictionary[ModelImages, int]()
        """The images that each model of this process had encoded when a stage last ended."""

    @cached_property
    def rates(self) -> DeviceRates | None:
        """Return the peak rates of this process's device, None if unknown."""
        return device_rates(self.device, self.threads)

    @contextmanager
    def memory_of(self, name: str | None, sums: Sums) -> Iterator[None]:
        """Add the peak memory of the block, under the name of a stage with a model; one without reports nothing."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        yield
        if name is not None:
            self.note_memory(name, sums)

    def note_memory(self, name: str, sums: Sums) -> None:
        """Add the peak memory since `memory_of` began, or since the start."""
        if self.device.type == "cuda":
            sums.add(f"memory/{name}/allocated_max", torch.cuda.max_memory_allocated())
            sums.add(f"memory/{name}/reserved_max", torch.cuda.max_memory_reserved())
        else:
            sums.add(f"memory/{name}/resident_max", psutil.Process().memory_info().rss)

    @contextmanager
    def computing(
        self, name: str, worker: TrainingBackend, sums: Sums, *passes: Rows, trains: bool = False
    ) -> Iterator[None]:
        """Add the utilisation of operations per second in the block, under a stage's name; a user's worker is not
        measured.

        `passes` are the rows that go through the model, forward and if it `trains` backward; none during an optimizer
        step.
        """
        start = time.perf_counter()
        yield
        if isinstance(worker, RoleWorker) and passes and worker.vision is not None:
            self.encoded(name, worker.images, sum(len(rows) for rows in passes), sums)
        if not isinstance(worker, RoleWorker) or self.rates is None:
            return
        peak = self.rates.operations.get(str(worker.dtype).removeprefix("torch."))
        if not peak:
            return
        done = 0.0
        for rows in filter(len, passes):
            sizes = self._sizes_of(worker.role, worker.is_scalar)
            counts = TokenCounts.of(rows, worker.shares_prompts(rows))
            # A backward pass takes as many operations for gradients of activations, and as many again for those of
            # trained weights.
            factor = 1.0 if not trains else 2.0 if worker.lora is not None else 3.0
            done += factor * operations.forward_operations(sizes, counts)
        sums.add(f"utilisation/operations/{name}", done, (time.perf_counter() - start) * peak)

    def _sizes_of(self, role: str, scalar: bool = False) -> MatrixSizes:
        if role not in self._sizes:
            role_config = settings_of(role, self.config)
            shape = model_shape(role_config.model.expanduser(), role_config.dtype, scalar)
            self._sizes[role] = MatrixSizes.of(shape.sizes, shape.parameters - shape.tower, scalar, shape.idle)
        return self._sizes[role]

    def encoded(self, name: str, images: ModelImages | None, rows: int, sums: Sums) -> None:
        """Add the images that a model's vision tower has encoded since its last stage, per row of the stage `name`."""
        if images is None or not rows:
            return
        sums.add(f"images/{name}/encoded", images.encoded_count - self._encoded.get(images, 0), rows)
        self._encoded[images] = images.encoded_count

    def speculated(self, stage: Stage, counts: Speculated | None, sums: Sums) -> None:
        """Add the gain by speculative tokens since this stage's last call; `counts` are the engine's."""
        if counts is None:
            return
        new, self._speculated[stage.role] = counts.since(self._speculated.get(stage.role, Speculated())), counts
        if new.tokens:
            sums.add(f"speculation/{stage.name}/drafted", new.drafted, new.tokens)
            sums.add(f"speculation/{stage.name}/passes", new.passes, new.tokens)
        if new.drafted:
            sums.add(f"speculation/{stage.name}/accepted", new.accepted, new.drafted)

    def decoded(
        self, stage: Stage, drawn: Drawn, slots: int, seconds: float, sums: Sums, peak_rows: int | None = None
    ) -> None:
        """Add the utilisation of memory bandwidth of a generate stage that took `seconds` for tokens generated in
        `slots` concurrent slots.

        `peak_rows` is the largest number of concurrent rows if processes took turns.
        """
        config, tokens = self.config, drawn.tokens[drawn.tokens > 0]
        if not len(tokens) or config.rollout.engine == "http" or self.rates is None:
            return
        # The model copies that decode for this process, the ranks per copy, and their bytes per second.
        copies, ranks, bandwidth = self.engines.count, self.engines.ranks, self.rates.bandwidth
        if copies:
            ranks, bandwidth = 1, copies * ranks * bandwidth
        own_slots = max(1, slots // ranks)
        steps = decoding(tokens, own_slots).steps if peak_rows is None else int(tokens.sum()) / peak_rows
        role, dtype = str(stage.role), config.rollout.dtype
        element_bytes = (dtype_named(dtype) if dtype else settings_of(role, config).dtype).itemsize
        steps, attended = steps * max(1, copies) / ranks, int(drawn.seen.sum())
        read = operations.decoding_bytes(self._sizes_of(role), element_bytes, steps, attended)
        sums.add(f"utilisation/bandwidth/{stage.name}", read, seconds * bandwidth)
