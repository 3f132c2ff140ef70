"""A role's worker: one model that infers over rows, accumulates gradients over them, and steps.

rows ──plan──▶ micro-batches ──pack──▶ hidden states ──▶ log-probs, entropy ──objective──▶ sums ──backward──▶ step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.config import Config
from braidrl.data.packing import plan_micro_batches
from braidrl.data.rows import Rows
from braidrl.models.attention import PackedSequences
from braidrl.models.data_parallel import DataParallel
from braidrl.models.loading import load_decoder
from braidrl.models.log_probs import linear_log_probs
from braidrl.models.objective import Objective, trained
from braidrl.models.optimizer import MasterOptimizer
from braidrl.models.packed import Packed, pack
from braidrl.observe.metrics import Sums

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
Advance = Callable[[int, int], None]
"""Told after each micro-batch how many rows and tokens it held."""


def choose_device(name: str) -> torch.device:
    """`auto` takes the CUDA device where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


class DecoderWorker:
    """A causal decoder as actor or reference. With `train` it holds an optimizer, without it is frozen."""

    def __init__(self, role: str, config: Config, train: bool, ranks: DataParallel | None = None) -> None:
        own = config.roles.get(role)
        self.role, self.config = role, config
        self.device = choose_device(config.device)
        self.path = Path((own and own.model) or config.model)
        dtype = DTYPES[(own and own.dtype) or config.dtype]
        self.model = load_decoder(self.path, dtype, self.device)
        self.model.requires_grad_(train).eval()
        self.max_tokens = config.trainer.max_tokens_per_device
        self.temperature = config.rollout.temperature
        self.optimizer: MasterOptimizer | None = None
        if train:
            peak = own.learning_rate if own and own.learning_rate is not None else config.trainer.learning_rate
            self.optimizer = MasterOptimizer(list(self.model.parameters()), config.trainer, peak, ranks)
            if config.trainer.activation_checkpointing:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def micro_batches(self, rows: Rows) -> Iterator[tuple[list[int], Rows]]:
        """Row numbers and rows of each micro-batch, of at most `max_tokens_per_device` tokens."""
        if len(rows):
            (plan,) = plan_micro_batches(rows["length"].tolist(), 1, self.max_tokens, uids=rows.uids())
            for numbers in plan:
                if numbers:
                    yield numbers, rows.take(numbers)

    def predict(self, packed: Packed, entropy_grad: bool = False) -> dict[str, Tensor]:
        """Log-probs and entropy (A,) of the action tokens under the current weights."""
        hidden = self.model.base_model(
            input_ids=packed.input_ids[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            sequences=PackedSequences.of(packed.sequence_lengths, self.device),
        ).last_hidden_state[0]
        weight = self.model.get_output_embeddings().weight
        log_probs, entropy = linear_log_probs(
            hidden[packed.predictors], weight, packed.targets, self.temperature, entropy_grad
        )
        return {"log_probs": log_probs, "entropy": entropy}

    @torch.no_grad()
    def log_probs(self, rows: Rows, advance: Advance | None = None) -> Ragged:
        """Log-probabilities of each row's action tokens, in the order of `rows`."""
        order: list[int] = []
        parts: list[Ragged] = []
        for numbers, part in self.micro_batches(rows):
            packed = pack(part, self.device)
            parts.append(Ragged(self.predict(packed)["log_probs"], packed.offsets).to("cpu"))
            order += numbers
            if advance:
                advance(len(part), len(packed.input_ids))
        if not parts:
            return Ragged(torch.empty(0), torch.zeros(1, dtype=torch.int64))
        return Ragged.cat(parts).take(torch.tensor(order).argsort())

    def accumulate(
        self, objective: Objective, rows: Rows, sums: Sums, advance: Advance | None = None
    ) -> dict[str, float]:
        """Adds the gradient sums of `rows`; may be called many times before `step`.

        Returns the loss sums by denominator; metrics per token go to `sums`.
        """
        assert self.optimizer is not None, f"{self.role} is not trained"
        totals: dict[str, float] = {}
        self.model.train()
        for _, part in self.micro_batches(trained(rows)):
            packed = pack(part, self.device)
            predicted = self.predict(packed, entropy_grad=objective.entropy_coef != 0)
            losses, metrics = objective.sums(part, packed.offsets, predicted)
            self.optimizer.backward(losses)
            for name, loss in losses.items():
                totals[name] = totals.get(name, 0.0) + float(loss.detach())
            for name, values in metrics.items():
                if name.endswith("_max"):
                    sums.highest(name, values.max())
                else:
                    sums.add(name, values.sum(), len(values))
            if advance:
                advance(len(part), len(packed.input_ids))
        self.model.eval()
        return totals

    def step(self, denominators: Mapping[str, float], iteration: int) -> float | None:
        """Divides the accumulated sums by their global counts and updates; the gradient norm, or None if there was nothing."""
        assert self.optimizer is not None, f"{self.role} is not trained"
        return self.optimizer.step(denominators, iteration)
