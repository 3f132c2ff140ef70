"""A training backend outside the package: torchtitan's Qwen3, its tensor parallelism and its checkpoint names, in
torchtitan 0.3.

    braid train examples/torchtitan/config.yaml            data 2 x tensor 2, in four processes

Braid gives rows, losses and the place in the layout; torchtitan builds, shards and names the model. Braid's optimizer
steps DTensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torchtitan.distributed.parallel_dims
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from transformers import AutoConfig, AutoTokenizer

from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.observe.metrics import Sums
from braidrl.training.backends import Advance, BackendSpec, ShardedBackend
from braidrl.training.memory.offload import OffloadableTensors
from braidrl.training.objective import Objective
from braidrl.training.optimizer import CONFIGURED, MasterOptimizer, StepOverrides
from braidrl.training.roles.checkpoint import divided_state
from braidrl.weights.checkpoint_files import WeightFiles
from braidrl.weights.shards import WeightPart, as_dtensor, local_shard, shard_of, storages, weight_parts

OPTIMIZER = "optimizer"
SAFE = {"weight": lambda tensor: None}
"""Weights are read from the directory and need no initial values."""


class TitanBackend(ShardedBackend):
    """Chosen by `trainer.backend: examples/torchtitan/backend.py:TitanBackend`, for actors and references that are
    Qwen3.
    """

    supports = ("tensor", "streaming", "offload", "optimizers")
    shared_model = None  # the engine has a model of its own

    def __init__(self, spec: BackendSpec) -> None:
        """Raises UserError for a critic, a reward model, or another family."""
        config = AutoConfig.from_pretrained(spec.path)
        if spec.is_scalar or config.model_type != "qwen3":
            raise UserError(
                f"{spec.role}: torchtitan's Qwen3 is an actor or a reference; write roles.{spec.role}.backend=torch"
            )
        self.role, self.path, self.device = spec.role, spec.path, spec.device
        self.temperature = spec.config.rollout.temperature
        self.ranks, self.weight_updates = spec.join(), 0
        titan = titan_config(config)
        set_qwen3_sharding_config(titan, enable_sp=False, enable_ep=False)
        self.model: Any = Qwen3Model(titan).to(spec.device, spec.dtype)
        self.names = Qwen3StateDictAdapter(titan, None)
        self.read(spec.path)
        if spec.layout.tensor > 1:
            # Its own choice of device is CUDA where it finds none.
            torchtitan.distributed.parallel_dims.device_type = spec.device.type
            ranks, data = self.ranks.size, spec.layout.data or 1
            self.model.parallelize(
                ParallelDims(
                    dp_replicate=data,
                    dp_shard=1,
                    cp=1,
                    tp=spec.layout.tensor,
                    pp=1,
                    ep=1,
                    world_size=ranks,
                    spmd_backend="default",
                )
            )
        # As in transformers, the padding token's embedding is not trained; a rank knows tokens by their places in its
        # shard.
        embedding = self.model.tok_embeddings
        rows = len(local_shard(embedding.weight))
        place = (
            -1 if config.pad_token_id is None else config.pad_token_id
        ) - self.ranks.rank % spec.layout.tensor * rows
        embedding.padding_idx = place if 0 <= place < rows else None
        self.model.requires_grad_(spec.train)
        self.offloadable = {"weights": OffloadableTensors(self.model.parameters)}
        self.optimizer: MasterOptimizer | None = None
        if spec.train:
            parameters = dict(self.model.named_parameters())
            self.optimizer = MasterOptimizer(parameters, spec.config.trainer, spec.learning_rate, self.ranks)
            self.offloadable["optimizer"] = OffloadableTensors(self.optimizer.tensors)

    def predict(self, rows: Rows, number: int) -> dict[str, Tensor]:
        """Return log-probs and entropies of a row's action tokens, (A,)."""
        tokens, mask = rows["tokens"][number].to(self.device), rows["action_mask"][number].bool().to(self.device)
        logits = self.model(tokens[None], torch.arange(len(tokens), device=self.device)[None])
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        log_probs = (whole[0, :-1][mask[1:]] / self.temperature).log_softmax(-1)
        picked = log_probs.gather(-1, tokens[1:][mask[1:], None])[:, 0]
        return {"log_probs": picked, "entropy": -(log_probs.exp() * log_probs).sum(-1).detach()}

    @torch.no_grad()
    def forward(self, name: str, rows: Rows, advance: Advance | None = None) -> Ragged:
        every, own = self.ranks.gather_rows(rows)
        found = [self.predict(every, number)[name].cpu() for number in range(len(every))][own]
        lengths = torch.tensor([len(one) for one in found], dtype=torch.int64)
        return Ragged.from_lengths(torch.cat([torch.empty(0), *found]) if found else torch.empty(0), lengths)

    def forward_backward(
        self, objective: Objective, rows: Rows, sums: Sums, advance: Advance | None = None
    ) -> dict[str, float]:
        assert self.optimizer is not None
        rows, _ = self.ranks.gather_rows(rows)
        rows, totals = objective.select(rows) if len(rows) else rows, dict[str, float]()
        self.optimizer.collect(objective.denominator)
        for number in range(len(rows)):
            row, predicted = rows.take([number]), self.predict(rows, number)
            losses, metrics = objective.sums(row, torch.tensor([0, len(predicted["log_probs"])]), predicted)
            # Sums stay sums: the optimizer divides them by global counts.
            losses[objective.denominator].backward()
            if self.ranks.is_reporting_rank:
                for name, loss in losses.items():
                    totals[name] = totals.get(name, 0.0) + float(loss.detach())
                sums.add_per_token(self.role, metrics)
                if advance:
                    advance(1, len(row["tokens"].values))
        return totals

    def optim_step(
        self, denominators: Mapping[str, float], iteration: int, overrides: StepOverrides = CONFIGURED
    ) -> float | None:
        assert self.optimizer is not None
        norm = self.optimizer.step(denominators, iteration, overrides)
        self.weight_updates += norm is not None
        return norm

    def named(self) -> dict[str, Tensor]:
        """Return the tensors by their names in the Hugging Face directory, sharded as they are."""
        found: dict[str, Tensor] = self.names.to_hf(dict(self.model.named_parameters(remove_duplicate=False)))
        return found

    def weights(self) -> Mapping[str, WeightPart]:
        return weight_parts(self.named())

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        for name, tensor in self.named().items():
            yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()

    def bytes_of(self, part: str) -> int:
        if part == "optimizer":
            return self.optimizer.bytes_in_use if self.optimizer else 0
        return sum(storage.nbytes() for storage in storages(self.model.parameters()))

    @torch.no_grad()
    def read(self, folder: Path) -> None:
        """Read the weights of a Hugging Face directory, each rank its shards."""
        files = WeightFiles(folder)
        for name, tensor in self.named().items():
            if name in files:  # a tied output layer is the embedding
                local_shard(tensor).copy_(shard_of(files[name], tensor))

    def load(self, folder: Path) -> None:
        self.read(folder)
        self.weight_updates += 1
        if self.optimizer is not None:
            known = dcp.FileSystemReader(folder / OPTIMIZER).read_metadata().state_dict_metadata
            wanted = {name: self.empty(name, about) for name, about in known.items()}
            dcp.load(wanted, checkpoint_id=folder / OPTIMIZER, no_dist=True)
            self.optimizer.load_state({name: local_shard(tensor) for name, tensor in wanted.items()})

    def empty(self, name: str, about: Any) -> Tensor:
        """Return an empty shard for a tensor of the optimizer's state."""
        assert self.optimizer is not None
        if not about.size:
            return torch.empty((), dtype=about.properties.dtype)
        parameter = self.optimizer.parameters[int(name.split(".")[0])]
        return as_dtensor(torch.empty_like(local_shard(parameter), dtype=about.properties.dtype), parameter)

    def export(self, folder: Path, write: bool = True) -> None:
        whole = {name: tensor.cpu().contiguous() for name, tensor in self.tensors()}
        if write:
            if self.model.enable_weight_tying:
                del whole["lm_head.weight"]
            folder.mkdir(parents=True, exist_ok=True)
            save_file(whole, folder / "model.safetensors", {"format": "pt"})
            AutoConfig.from_pretrained(self.path).save_pretrained(folder)
            AutoTokenizer.from_pretrained(self.path).save_pretrained(folder)
        if self.optimizer is not None and (write or self.ranks.is_sharded):
            dcp.save(divided_state(self.optimizer), checkpoint_id=folder / OPTIMIZER, no_dist=not self.ranks.is_sharded)


def titan_config(config: Any) -> Qwen3Model.Config:
    """Return torchtitan's configuration of a Qwen3 that transformers describes."""
    width, head = config.hidden_size, config.head_dim
    norm = partial(RMSNorm.Config, eps=config.rms_norm_eps, param_init=SAFE)
    rope = CosSinRoPE.Config(
        dim=head, max_seq_len=config.max_position_embeddings, theta=config.rope_parameters["rope_theta"]
    )

    def layers() -> Iterator[Qwen3TransformerBlock.Config]:
        for _ in range(config.num_hidden_layers):
            # Rows are computed one by one, so that causal attention needs no mask.
            attention = make_gqa_config(
                dim=width,
                n_heads=config.num_attention_heads,
                n_kv_heads=config.num_key_value_heads,
                head_dim=head,
                wqkv_param_init=SAFE,
                wo_param_init=SAFE,
                inner_attention=ScaledDotProductAttention.Config(),
                rope=rope,
                qk_norm=norm(normalized_shape=head),
            )
            inner = make_ffn_config(
                dim=width, hidden_dim=config.intermediate_size, w1_param_init=SAFE, w2w3_param_init=SAFE
            )
            yield Qwen3TransformerBlock.Config(
                attention=attention,
                feed_forward=inner,
                attention_norm=norm(normalized_shape=width),
                ffn_norm=norm(normalized_shape=width),
            )

    return Qwen3Model.Config(
        vocab_size=config.vocab_size,
        dim=width,
        norm=norm(normalized_shape=width),
        layers=list(layers()),
        enable_weight_tying=config.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=width, param_init=SAFE),
        lm_head=Linear.Config(in_features=width, out_features=config.vocab_size, param_init=SAFE),
    )
