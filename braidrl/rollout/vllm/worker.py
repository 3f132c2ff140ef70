"""What vLLM's workers do for Braid, in whatever process each of them is: take weights.

path ──▶ worker: maps the file ──────────────┬─tensor by tensor──▶ vLLM's loaders, which copy the worker's own part of each
notice ──▶ worker: joins a group, receives ──┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from braidrl.rollout.weights.broadcast import received
from braidrl.rollout.weights.shared_file import WeightFile


class TakesWeights:
    """vLLM adds this to the class of its workers (`worker_extension_cls`), whose methods `collective_rpc` calls by name."""

    reload_weights: Callable[..., None]
    """vLLM's own, as the next three are."""
    vllm_config: Any
    rank: int
    device: Any
    has_weights_in_part = False

    def take_weights(self, path: str) -> None:
        """Generates with the weights in a file from now on. The caller has seen to it that they are the model's."""
        self.load_as_they_come(WeightFile(path).tensors())

    def receive_weights(self, notice: Mapping[str, Any]) -> None:
        """Generates with the weights that the run sends to all workers at once; `notice` is plain."""
        parallel = self.vllm_config.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + self.rank
        self.load_as_they_come(received(notice, worker, self.device))

    def load_as_they_come(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Nothing changes before the first one is there. Raises RuntimeError for good once they ended in the middle.

        vLLM would go on where it stopped, and take what comes next for what was missing.
        """
        if self.has_weights_in_part:
            raise RuntimeError("only a part of an earlier version arrived: vLLM has to be started anew")
        first = next(tensors)
        try:
            self.reload_weights(weights_iterator=chain([first], tensors))
        except BaseException:
            self.has_weights_in_part = True
            raise
