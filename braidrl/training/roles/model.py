"""A rank's part of a role: the sharded model, its optimizer where it is trained, and the forward pass.

folder ──read──▶ model ──adapters──▶ sharded ──▶ optimizer           packed tokens ──▶ hidden states ──predict──▶ by name
"""

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.devices import choose_device
from braidrl.config import Config
from braidrl.native.malloc import keep_freed_memory
from braidrl.training.compute.cpu_layers import compile_layers
from braidrl.training.compute.cuda_layers import fuse_layers
from braidrl.training.compute.packed import Packed
from braidrl.training.four_bit import quantize_adapted
from braidrl.training.likelihood import Likelihood
from braidrl.training.lora import add_adapters, train_adapters_only
from braidrl.training.memory.offload import OffloadableTensors
from braidrl.training.objective import Objective
from braidrl.training.optimizer import MasterOptimizer
from braidrl.training.parallel.pipeline import HIDDEN
from braidrl.training.parallel.replicated import DataParallel
from braidrl.training.parallel.sharded import apply_layout
from braidrl.training.role_settings import (
    checkpoints_activations,
    dtype_of,
    layout_of,
    learning_rate_of,
    lora_of,
    max_tokens_of,
    merges_adapters,
    model_path,
)
from braidrl.training.side_files import side_files
from braidrl.weights.checkpoint_files import ParameterReader, WeightFiles
from braidrl.weights.shards import shapes_of

FAST_LAYERS = {"cpu": compile_layers, "cuda": fuse_layers}
"""By kind of device, what makes a model compute with faster kernels than torch's, where there are any."""


class RoleModel(ABC):
    """The model of one role. It has an optimizer with `train`, and is frozen otherwise."""

    def __init__(
        self, role: str, config: Config, train: bool, ranks: DataParallel | None = None, is_copy: bool = False
    ) -> None:
        """Load the model; one that `is_copy` is frozen, and takes its weights from a trained one."""
        self.role, self.config, self.train, self.is_copy = role, config, train, is_copy
        self.weight_updates = 0
        """How often the weights have become others."""
        self.device = choose_device(config.device)
        keep_freed_memory()
        self.path = model_path(role, config)
        self.dtype = dtype_of(role, config)
        self.ranks = apply_layout(layout_of(role, config), ranks or DataParallel(), self.device)
        self.lora = lora_of(role, config) if train else None
        # Ranks that divide a model read it part by part. Adapters are drawn for a whole one.
        self.model = self.load_model(self.path, self.ranks.is_sharded and not self.lora)
        self.base_shapes = shapes_of(self.model)
        if self.lora:
            add_adapters(self.model, self.lora, config.seed)
            if self.lora.base_dtype:
                quantize_adapted(self.model)
        self.shapes = shapes_of(self.model)
        if config.trainer.compile:
            FAST_LAYERS[self.device.type](self.model)
        predict = self.predict if self.ranks.has_predictions else self.pipeline_output
        self.compute = self.ranks.parallelize(self.model, predict, ParameterReader(self.path, self.model))
        # Only now: a model that ranks divide may be too large for one device.
        self.model.to(self.device).requires_grad_(train).eval()
        if self.lora:
            train_adapters_only(self.model)
        self.max_tokens = max_tokens_of(role, config)
        self.optimizer: MasterOptimizer | None = None
        if train:
            peak = learning_rate_of(role, config)
            names, parameters = zip(*self.model.named_parameters(), strict=True)
            places = [list(self.shapes).index(name) for name in names]
            self.optimizer = MasterOptimizer(parameters, config.trainer, peak, self.ranks, places)
            if not self.lora:  # whose layers have other names
                self.optimizer.read_masters(names, WeightFiles(self.path))
            if checkpoints_activations(role, config):
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
            if not dist.is_initialized() or dist.get_rank() == 0:  # the rank that writes them
                _ = self.side_files
        self.background: dist.ProcessGroup | None = None
        """The group of ranks that write a checkpoint while they train."""
        self.offloadable = {"weights": OffloadableTensors(self._weights)}
        """Tensors that can be offloaded while other roles need the device."""
        if self.optimizer is not None:
            self.offloadable["optimizer"] = OffloadableTensors(self.optimizer.tensors)

    def _weights(self) -> list[Tensor]:
        self.ranks.reshard(self.model)
        return list(self.model.parameters())

    @cached_property
    def side_files(self) -> dict[str, bytes]:
        """Return the files beside the weights in a checkpoint, by name."""
        return side_files(self.model, self.path)

    @property
    def has_full_weights(self) -> bool:
        """Return True where the module's own parameters are the role's full weights."""
        return self.lora is None and not self.ranks.is_sharded

    @property
    def shares_weights(self) -> bool:
        """Return True where an engine in this process may decode with the module itself, adapters and all."""
        return not self.ranks.is_sharded and not merges_adapters(self.lora, self.config)

    @abstractmethod
    def load_model(self, folder: Path, on_meta: bool = False) -> Any:
        """Load the kind of model that this role needs from a Hugging Face directory, on the CPU or with parameters left `on_meta`."""

    @abstractmethod
    def predict(self, packed: Packed, objective: Objective | Likelihood | None = None) -> dict[str, Tensor]:
        """Compute the outputs that the objective's loss needs, by name; without an objective, those of inference."""

    def pipeline_output(self, packed: Packed, objective: Objective | Likelihood | None = None) -> dict[str, Tensor]:
        """Compute the hidden states for the next pipeline rank, in place of `predict` where this rank lacks the last layers."""
        return {HIDDEN: self._through_layers(packed)}

    def hidden_states(self, packed: Packed) -> Tensor:
        """Return the last layer's output at each packed token, (N, D)."""
        return self._through_layers(packed)[0]

    def _through_layers(self, packed: Packed) -> Tensor:
        """Return the output of this rank's last layer, (1, N, D)."""
        hidden: Tensor = self.model.base_model(
            input_ids=packed.input_ids[None] if packed.hidden is None else None,
            inputs_embeds=packed.hidden,
            position_ids=packed.position_ids[None],
            use_cache=False,
            sequences=packed.attention(),
        ).last_hidden_state
        return hidden
