"""Braid's extension of vLLM's workers: receives weights in the process of each worker.

path ──▶ worker: maps the file ──────────────┬─tensor by tensor──▶ vLLM's loaders, which copy the worker's own part of each
notice ──▶ worker: joins a group, receives ──┘
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from braidrl.weights.collective import Incoming, TransferNotice
from braidrl.weights.file import WeightFile
from braidrl.weights.model_files import HubNames, hub_names


class TakesWeights:
    """The extension that vLLM adds to its worker class (`worker_extension_cls`); `collective_rpc` calls its methods by name."""

    reload_weights: Callable[..., None]
    """An attribute of vLLM's worker, as the next three are."""
    vllm_config: Any
    rank: int
    device: Any
    has_weights_in_part = False
    hub_names: HubNames | None = None
    """The conversion to the names that vLLM's loaders know, made once."""

    def take_weights(self, path: str) -> None:
        """Load weights from a file. The caller has checked that they fit the model."""
        self.load_as_they_come(WeightFile(path).tensors())

    def receive_weights(self, notice: Mapping[str, Any]) -> None:
        """Load weights that the run sends to all workers; `notice` is plain JSON."""
        parallel = self.vllm_config.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + self.rank
        self.load_as_they_come(Incoming(TransferNotice(**notice), worker, self.device).tensors())

    def load_as_they_come(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load tensors one by one. Raises RuntimeError from then on if they end in the middle.

        Nothing changes before the first one arrives. After a partial load vLLM would take the next version's tensors for the missing ones.
        """
        if self.has_weights_in_part:
            raise RuntimeError("only a part of an earlier version arrived: vLLM has to be started anew")
        if self.hub_names is None:
            self.hub_names = hub_names(Path(self.vllm_config.model_config.model))
        first = next(tensors)
        try:
            self.reload_weights(weights_iterator=self.hub_names.of(chain([first], tensors)))
        except BaseException:
            self.has_weights_in_part = True
            raise
