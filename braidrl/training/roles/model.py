"""A rank's part of a role: the sharded model, the optimizer of a trained role, and the forward pass.

folder ──read──▶ model ──adapters──▶ sharded ──▶ optimizer           packed tokens ──▶ hidden states ──predict──▶ by name
         └─▶ the files beside the weights, built when the model is loaded, so that no checkpoint fails on one

tokens       p  p  p  a1 a2 a3
log_probs             l1 l2 l3       of each action, by an actor or a reference
values             v1 v2 v3          of the state before each action, by a critic, at the predicting position
score                     s          of the row, by a reward model, at its last token
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig

from braidrl.cluster.devices import choose_device
from braidrl.cluster.ranks import tell
from braidrl.config import Config
from braidrl.errors import first_line
from braidrl.native.malloc import keep_freed_memory
from braidrl.training.compute.cpu_layers import compile_layers
from braidrl.training.compute.cuda_layers import use_kernels
from braidrl.training.compute.packed import Packed
from braidrl.training.decoders.body import checkpoint_activations, run_body
from braidrl.training.decoders.head import predicted_log_probs
from braidrl.training.loading import load_decoder, load_scorer
from braidrl.training.lora import FourBitLinear, add_adapters, is_adapter
from braidrl.training.memory.offload import OffloadableTensors
from braidrl.training.objective import Likelihood, Objective
from braidrl.training.optimizer import MasterOptimizer
from braidrl.training.parallel.layouts import DataParallel, apply_layout
from braidrl.training.parallel.pipeline import HIDDEN
from braidrl.training.role_settings import settings_of
from braidrl.weights.checkpoint_files import ParameterReader
from braidrl.weights.model_files import ModelFiles
from braidrl.weights.shards import shapes_of

FAST_LAYERS = {"cpu": compile_layers, "cuda": use_kernels}
"""Functions that switch a model to faster kernels, by device type."""
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
)  # fmt: skip


class RoleModel:
    """The model of one role: a decoder, or with `is_scalar` a critic or reward model; without `train` it is frozen."""

    def __init__(
        self, role: str, config: Config, train: bool, ranks: DataParallel | None = None, is_copy: bool = False,
        is_scalar: bool = False,
    ) -> None:  # fmt: skip
        """Load the model; with `is_copy` it is frozen and receives its weights from a trained one."""
        self.role, self.config, self.train, self.is_copy, self.is_scalar = role, config, train, is_copy, is_scalar
        self.weight_updates = 0
        self.device = choose_device(config.device)
        keep_freed_memory()
        own = settings_of(role, config)
        self.path, self.dtype, self.max_tokens = own.model, own.dtype, own.max_tokens
        self.ranks = apply_layout(own.layout, ranks or DataParallel(), self.device)
        self.lora = own.lora if train else None
        # A sharded model is read part by part, except with adapters, which are initialised on the full model.
        self.model = self.load_model(self.path, self.ranks.is_sharded and not self.lora)
        self.base_shapes = shapes_of(self.model)
        if self.lora:
            add_adapters(self.model, self.lora, config.seed)
            for module in list(self.model.modules()) if self.lora.base_dtype else ():
                if isinstance(base := getattr(module, "base_layer", None), nn.Linear):
                    module.base_layer = FourBitLinear(base)
        self.shapes = shapes_of(self.model)
        if config.trainer.compile:
            FAST_LAYERS[self.device.type](self.model)
        files = ModelFiles(self.path.expanduser(), self.model)
        # All pipeline ranks but the last pass hidden states on.
        predict = self.predict if self.ranks.has_predictions else lambda p, *_: {HIDDEN: self.hidden_states(p)[None]}
        self.compute = self.ranks.parallelize(self.model, predict, ParameterReader(self.path, self.model, files=files))
        # Only after sharding: the full model may be too large for one device.
        self.model.to(self.device).eval()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(train and (not self.lora or is_adapter(name)))
        self.optimizer: MasterOptimizer | None = None
        if train:
            names, parameters = zip(*self.model.named_parameters(), strict=True)
            numbers = [list(self.shapes).index(name) for name in names]
            self.optimizer = MasterOptimizer(parameters, config.trainer, own.learning_rate, self.ranks, numbers)
            if not self.lora:  # adapted layers have other names
                self.optimizer.read_masters(names, files)
            if own.activation_checkpointing:
                checkpoint_activations(self.model)
        self.side_files: dict[str, bytes] | None = None
        """A checkpoint's files beside its weights, by name."""
        if train and (not dist.is_initialized() or dist.get_rank() == 0):  # the rank that writes them
            self.side_files = side_files(self.model, self.path)
        self.background: dist.ProcessGroup | None = None
        """The process group for writing a checkpoint during training."""
        self.offloadable: Mapping[str, OffloadableTensors] = {"weights": OffloadableTensors(self._local_parameters)}
        if self.optimizer is not None:
            self.offloadable = {**self.offloadable, "optimizer": OffloadableTensors(self.optimizer.tensors)}

    def _local_parameters(self) -> list[Tensor]:
        self.ranks.reshard(self.model)
        return list(self.model.parameters())

    def load_model(self, folder: Path, on_meta: bool = False) -> Any:
        """Load this role's kind of model from a Hugging Face directory, on the CPU or with parameters left `on_meta`."""
        if self.is_scalar:
            return load_scorer(folder, self.dtype, fresh_head=self.train or self.is_copy, on_meta=on_meta)
        return load_decoder(folder, self.dtype, on_meta=on_meta)

    def hidden_states(self, packed: Packed) -> Tensor:
        """Return the output of this rank's last layer for each packed token, (N, D)."""
        ids = packed.input_ids[None] if packed.hidden is None else None
        return run_body(self.model, ids, packed.position_ids[None], packed.attention(), packed.hidden)[0]

    def predict(self, packed: Packed, objective: Objective | Likelihood | None = None) -> dict[str, Tensor]:
        """Compute the outputs that the loss needs, by name; without an objective, the outputs of inference.

        A decoder gives `log_probs` and `entropy` of the A action tokens, (A,) float32 or float64 in nats at the run's temperature, a
        scalar model `values` (A,) and `scores` (B,), one per row.
        """
        hidden = self.hidden_states(packed)
        if not self.is_scalar:
            log_probs, entropy = predicted_log_probs(
                self.model, hidden[packed.predictors], packed.targets, self.config.rollout.temperature,
                with_entropy_grad=objective is not None and objective.entropy_coef != 0, compiled=self.config.trainer.compile,
            )  # fmt: skip
            return {"log_probs": log_probs, "entropy": entropy}
        wanted = {"values": packed.predictors, "scores": packed.row_ends}
        if objective is not None:
            wanted = {name: places for name, places in wanted.items() if name in objective.loss.reads}
        # At least float32: returns and margins need more precision than bfloat16.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        weight = self.model.score.weight.to(dtype)
        return {name: (hidden[places].to(dtype) @ weight.T).squeeze(-1) for name, places in wanted.items()}


def save_weights(model: Any, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a model's Hugging Face directory without its generation settings, which transformers may refuse to write."""
    generation = model.generation_config if model.can_generate() else None
    if generation is not None:
        model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        if generation is not None:
            model.generation_config = generation


def side_files(model: Any, path: Path) -> dict[str, bytes]:
    """Return the files of a Hugging Face directory besides its weights, by name.

    A file that transformers refuses to write is copied unchanged from the model's folder, with a warning.
    """
    generation: Any = model.generation_config if model.can_generate() else None
    with TemporaryDirectory(prefix="braid-side-files-") as name:
        folder = Path(name)
        save_weights(model, folder, {})
        for weights in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
            weights.unlink()
        (folder / GENERATION).unlink(missing_ok=True)
        parts: dict[str, Callable[[], object]] = {
            "tokenizer": lambda: AutoTokenizer.from_pretrained(path, local_files_only=True).save_pretrained(folder)
        }
        if generation is not None:
            parts[GENERATION] = lambda: generation.save_pretrained(folder)
        for part, write in parts.items():
            try:
                write()
            except Exception as error:
                tell(
                    f"{path}: its {part} cannot be written as transformers would ({first_line(error)}); it is copied as it is"
                )
                for file in (GENERATION,) if part == GENERATION else TOKENIZER_FILES:
                    for found in path.glob(file):
                        shutil.copy(found, folder)
        return {
            str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
        }
