"""Creation of a role's training backend, and the built-in workers of decoders and scalar models.

tokens       p  p  p  a1 a2 a3
log_probs             l1 l2 l3       of each action, by an actor or a reference
values             v1 v2 v3          of the state before each action, by a critic, at the predicting position
score                     s          of the row, by a reward model, at its last token
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidrl.config import Config
from braidrl.flow import Flow
from braidrl.training.backends import BACKENDS, BackendSpec, TrainingBackend
from braidrl.training.compute.packed import Packed
from braidrl.training.decoders.head import predicted_log_probs
from braidrl.training.loading import load_decoder, load_scorer
from braidrl.training.objective import Likelihood, Objective
from braidrl.training.parallel.replicated import DataParallel
from braidrl.training.role_settings import backend_of
from braidrl.training.roles.base import RoleWorker


class ScalarWorker(RoleWorker):
    """A worker that predicts `values` (A,), one per action token, and `scores` (B,), one per row."""

    def load_model(self, folder: Path, on_meta: bool = False) -> Any:
        return load_scorer(folder, self.dtype, fresh_head=self.train or self.is_copy, on_meta=on_meta)

    def predict(self, packed: Packed, objective: Objective | Likelihood | None = None) -> dict[str, Tensor]:
        hidden = self.hidden_states(packed)
        wanted = {"values": packed.predictors, "scores": packed.row_ends}
        if objective is not None:
            wanted = {name: places for name, places in wanted.items() if name in objective.loss.reads}
        # At least float32: returns and margins need more precision than bfloat16.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        weight = self.model.score.weight.to(dtype)
        return {name: (hidden[places].to(dtype) @ weight.T).squeeze(-1) for name, places in wanted.items()}


class DecoderWorker(RoleWorker):
    """A worker that predicts `log_probs` and `entropy` (A,) of the action tokens."""

    def load_model(self, folder: Path, on_meta: bool = False) -> Any:
        return load_decoder(folder, self.dtype, on_meta=on_meta)

    def predict(self, packed: Packed, objective: Objective | Likelihood | None = None) -> dict[str, Tensor]:
        """Predict every action token of a micro-batch.

        Args:
            packed: Its N tokens, of which P are predicted.
            objective: The loss; None for inference.

        Returns:
            `log_probs` and `entropy`, (P,) float32 or float64, in nats at the run's temperature.
        """
        hidden = self.hidden_states(packed)[packed.predictors]
        with_entropy_grad = objective is not None and objective.entropy_coef != 0
        temperature = self.config.rollout.temperature
        log_probs, entropy = predicted_log_probs(
            self.model, hidden, packed.targets, temperature, with_entropy_grad, compiled=self.config.trainer.compile
        )
        return {"log_probs": log_probs, "entropy": entropy}


def make_worker(
    role: str, config: Config, flow: Flow, ranks: DataParallel | None = None, training: bool = True
) -> TrainingBackend:
    """Create the role's backend, with a scalar head for values or scores, and with an optimizer if the flow trains it.

    Without `training` it is a frozen copy that receives its weights.
    """
    trained = role in flow.trained_roles
    spec = BackendSpec(
        role, config, training and trained, role in flow.scalar_roles, trained and not training, ranks or DataParallel()
    )
    worker: TrainingBackend = BACKENDS.find(backend_of(role, config))(spec)
    return worker


def torch_backend(spec: BackendSpec) -> RoleWorker:
    """Create the built-in backend."""
    kind = ScalarWorker if spec.is_scalar else DecoderWorker
    return kind(spec.role, spec.config, spec.train, spec.ranks, is_copy=spec.is_copy)


def torch_worker(worker: TrainingBackend) -> RoleWorker:
    """Return the worker as a `RoleWorker`; only the built-in backend supports offloading, sharded generation and copies."""
    assert isinstance(worker, RoleWorker), f"check_backends lets {worker.role} have no other here"
    return worker
