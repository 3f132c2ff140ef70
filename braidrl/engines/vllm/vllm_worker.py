"""Braid's extension of vLLM's workers: receives weights in the process of each worker.

path ──▶ worker: maps the file ──────────────┬─its own slices──▶ vLLM's live parameters
notice ──▶ worker: joins a group, receives ──┴─tensor by tensor──▶ vLLM's loaders, where it keeps the weights in another form
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from braidrl.weights.collective import Incoming, TransferNotice
from braidrl.weights.file import WeightFile
from braidrl.weights.in_place import shapes_of
from braidrl.weights.model_files import HubNames, hub_names
from braidrl.weights.shard_index import WeightPart

if "vllm" in sys.modules:
    # vLLM imports this module in each worker before it loads the model.
    from braidrl.engines.vllm.live_weights import keep_weights_plain

    keep_weights_plain()


class TakesWeights:
    """The extension that vLLM adds to its worker class (`worker_extension_cls`); `collective_rpc` calls its methods by name."""

    reload_weights: Callable[..., None]
    """An attribute of vLLM's worker, as the next four are."""
    model_runner: Any
    vllm_config: Any
    rank: int
    device: Any
    has_weights_in_part = False
    live: Mapping[str, WeightPart] | None = None
    """The live parameters; empty where vLLM keeps them in another form, None before they are looked for."""
    hub_names: HubNames | None = None
    """The conversion to the names that vLLM's loaders know, made once."""

    def take_weights(self, path: str) -> None:
        """Load weights from a file. The caller has checked that they fit the model."""
        file = WeightFile(path)
        if live := self.live_parts():
            self.load_in_place(lambda: file.put_into(live), lambda: True)
        else:
            self.load_as_they_come(file.tensors())

    def receive_weights(self, notice: Mapping[str, Any]) -> None:
        """Load weights that the run sends to all workers; `notice` is plain JSON."""
        parallel = self.vllm_config.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + self.rank
        incoming = Incoming(TransferNotice(**notice), worker, self.device)
        if live := self.live_parts():
            self.load_in_place(lambda: incoming.receive(live), lambda: incoming.begun)
        else:
            self.load_as_they_come(incoming.tensors())

    @property
    def model_folder(self) -> Path:
        """Return the model's directory. `model_config.model` becomes the folder of the last update, which may be gone."""
        return Path(self.vllm_config.model_config.hf_config.name_or_path)

    def live_parts(self) -> Mapping[str, WeightPart]:
        """Return this worker's parts of the live weights; empty where vLLM keeps them in another form."""
        if self.live is None:
            from braidrl.engines.vllm.live_weights import WeightsNotLive, live_parts

            config = self.vllm_config.model_config
            try:
                self.live = live_parts(self.model_runner.get_model(), shapes_of(self.model_folder), config.dtype)
            except WeightsNotLive:
                self.live = {}
        return self.live

    def load_in_place(self, load: Callable[[], object], begun: Callable[[], bool]) -> None:
        """Load into the live parameters. Raises RuntimeError from then on if it fails after it has `begun` to change them."""
        self._check_whole()
        try:
            load()
        except BaseException:
            self.has_weights_in_part = begun()
            raise
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()

    def load_as_they_come(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load tensors one by one. Raises RuntimeError from then on if they end in the middle, or if vLLM leaves some as they were.

        Nothing changes before the first one arrives. After a partial load vLLM would take the next version's tensors for the missing ones.
        """
        from braidrl.engines.vllm.live_weights import load_sinks, parts_of_gpt_oss, unloaded_parameters

        self._check_whole()
        if self.hub_names is None:
            self.hub_names = hub_names(self.model_folder)
        first, sinks, model = next(tensors), dict[str, Tensor](), self.model_runner.get_model()
        come = self.hub_names.of(chain([first], tensors))
        if self.vllm_config.model_config.hf_config.model_type == "gpt_oss":
            come = parts_of_gpt_oss(come, sinks)
        try:
            with unloaded_parameters(model) as unloaded:
                self.reload_weights(weights_iterator=come)
            if missing := sorted(set(unloaded) - load_sinks(model, sinks)):
                raise RuntimeError(f"vLLM gives {missing[0]} no new values, and {len(missing) - 1} more")
        except BaseException:
            self.has_weights_in_part = True
            raise

    def _check_whole(self) -> None:
        if self.has_weights_in_part:
            raise RuntimeError("only a part of an earlier version arrived: vLLM has to be started anew")
