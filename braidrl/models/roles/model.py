"""What a rank holds of a role: its part of the model, divided as the layout says, the optimizer where it is trained, and the forward pass.

folder ──read──▶ model ──adapters──▶ divided among ranks ──▶ optimizer           packed tokens ──▶ hidden states ──predict──▶ by name
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from braidrl.config import Config
from braidrl.models.compute.packed import Packed
from braidrl.models.cpu.layers import compile_layers
from braidrl.models.cpu.malloc import keep_freed_memory
from braidrl.models.lora import add_adapters, train_adapters_only
from braidrl.models.memory.offload import Movable
from braidrl.models.objective import Objective
from braidrl.models.optimizer import MasterOptimizer
from braidrl.models.parallel.pipeline import HIDDEN
from braidrl.models.parallel.replicated import DataParallel
from braidrl.models.parallel.sharded import laid_out
from braidrl.models.parallel.shards import shapes_of
from braidrl.models.role_settings import (
    DTYPES,
    checkpoints_activations,
    choose_device,
    layout_of,
    lora_of,
    max_tokens_of,
    model_path,
)
from braidrl.models.roles.likelihood import Likelihood
from braidrl.models.weight_files import Filling


class RoleModel(ABC):
    """A model by its role. With `train` it has an optimizer, without it is frozen."""

    def __init__(
        self, role: str, config: Config, train: bool, ranks: DataParallel | None = None, copies: bool = False
    ) -> None:
        """One that `copies` is frozen, and its weights come from one that is trained."""
        own = config.roles.get(role)
        self.role, self.config, self.train, self.copies = role, config, train, copies
        self.changes = 0
        """How often the weights have become others."""
        self.device = choose_device(config.device)
        keep_freed_memory()
        self.path = model_path(role, config)
        self.dtype = DTYPES[(own and own.dtype) or config.dtype]
        self.ranks = laid_out(layout_of(role, config), ranks or DataParallel(), self.device)
        self.lora = lora_of(role, config) if train else None
        # Ranks that divide a model read it part by part. Adapters are drawn for a whole one.
        self.model = self.load_model(self.path, self.ranks.divided and not self.lora)
        self.base_shapes = shapes_of(self.model)
        if self.lora:
            add_adapters(self.model, self.lora, config.seed)
        self.shapes = shapes_of(self.model)
        if config.trainer.compile and self.device.type == "cpu":
            compile_layers(self.model)
        predict = self.predict if self.ranks.predicts else self.pass_on
        self.compute = self.ranks.place(self.model, predict, Filling(self.path, self.model))
        # Only now: a model that ranks divide may be too large for one device.
        self.model.to(self.device).requires_grad_(train).eval()
        if self.lora:
            train_adapters_only(self.model)
        self.max_tokens = max_tokens_of(role, config)
        self.optimizer: MasterOptimizer | None = None
        if train:
            peak = own.learning_rate if own and own.learning_rate is not None else config.trainer.learning_rate
            names, parameters = zip(*self.model.named_parameters(), strict=True)
            places = [list(self.shapes).index(name) for name in names]
            self.optimizer = MasterOptimizer(parameters, config.trainer, peak, self.ranks, places)
            if checkpoints_activations(role, config):
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.background: dist.ProcessGroup | None = None
        """In which the ranks meet that write a checkpoint while they train."""
        self.movable = {"weights": Movable(self._weights)}
        """What can be put away while other roles need the device."""
        if self.optimizer is not None:
            self.movable["optimizer"] = Movable(self.optimizer.tensors)

    def _weights(self) -> list[Tensor]:
        self.ranks.settle(self.model)
        return list(self.model.parameters())

    @property
    def holds_its_weights(self) -> bool:
        """True where the module's own parameters are the role's weights, whole: what an engine in this process may share."""
        return self.lora is None and not self.ranks.divided

    @abstractmethod
    def load_model(self, folder: Path, unread: bool = False) -> Any:
        """The kind of model that this role needs from a Hugging Face directory: whole, on the CPU, or its weights still `unread`."""

    @abstractmethod
    def predict(self, packed: Packed, objective: Objective | Likelihood | None = None) -> dict[str, Tensor]:
        """What a forward pass computes for the objective's loss, by name; without one, what inference needs."""

    def pass_on(self, packed: Packed, objective: Objective | Likelihood | None = None) -> dict[str, Tensor]:
        """In place of `predict` where another rank has the last layers."""
        return {HIDDEN: self._through_layers(packed)}

    def hidden_states(self, packed: Packed) -> Tensor:
        """The last layer's output at each packed token, (N, D)."""
        return self._through_layers(packed)[0]

    def _through_layers(self, packed: Packed) -> Tensor:
        """What comes out of the last layer that this rank has, (1, N, D)."""
        hidden: Tensor = self.model.base_model(
            input_ids=packed.input_ids[None] if packed.hidden is None else None,
            inputs_embeds=packed.hidden,
            position_ids=packed.position_ids[None],
            use_cache=False,
            sequences=packed.attention(),
        ).last_hidden_state
        return hidden
