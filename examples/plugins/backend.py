"""A user-defined training backend: a transformers model, one row at a time, stepped by SGD.

Written to be read, not for speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.observe.metrics import Sums
from braidrl.training.backends import Advance, BackendSpec
from braidrl.training.objective import Objective
from braidrl.training.optimizer import CONFIGURED, StepOverrides


class PlainBackend:
    """A backend for actors and references, chosen by `trainer.backend: examples/plugins/backend.py:PlainBackend`."""

    shared_model = None

    def __init__(self, spec: BackendSpec) -> None:
        """Load the role's model. Raises UserError for a critic or a reward model."""
        if spec.is_scalar:
            raise UserError(f"{spec.role}: PlainBackend has no scalar head; write roles.{spec.role}.backend=torch")
        self.role, self.ranks, self.path, self.dtype = spec.role, spec.ranks, spec.path, spec.dtype
        self.temperature = spec.config.rollout.temperature
        self.longest = spec.config.trainer.max_grad_norm or torch.inf
        self.model: Any = AutoModelForCausalLM.from_pretrained(spec.path, dtype=spec.dtype)
        self.model.requires_grad_(spec.train)
        self.learning_rate = spec.learning_rate
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=spec.learning_rate) if spec.train else None

    def predict(self, rows: Rows) -> tuple[dict[str, Tensor], Tensor]:
        """Return log-probs and entropies of all action tokens, (A,), and the offsets of the rows in them, (B + 1,)."""
        found = []
        for row in range(len(rows)):
            tokens, mask = rows["tokens"][row], rows["action_mask"][row].bool()
            logits = self.model(tokens[None]).logits[0, :-1] / self.temperature
            log_probs = logits.log_softmax(-1)[mask[1:]]
            picked = log_probs.gather(-1, tokens[1:][mask[1:], None])[:, 0]
            found.append((picked, -(log_probs.exp() * log_probs).sum(-1).detach()))
        offsets = torch.tensor([0, *(len(picked) for picked, _ in found)]).cumsum(0)
        picked, entropy = (torch.cat([torch.empty(0, dtype=self.dtype), *parts]) for parts in zip(*found, strict=True))
        return {"log_probs": picked, "entropy": entropy}, offsets

    @torch.no_grad()
    def forward(self, name: str, rows: Rows, advance: Advance | None = None) -> Ragged:
        if not len(rows):
            return Ragged(torch.empty(0), torch.zeros(1, dtype=torch.int64))
        predicted, offsets = self.predict(rows)
        return Ragged(predicted[name], offsets)

    def forward_backward(
        self, objective: Objective, rows: Rows, sums: Sums, advance: Advance | None = None
    ) -> dict[str, float]:
        rows = objective.select(rows) if len(rows) else rows
        if not len(rows):
            return {}
        predicted, offsets = self.predict(rows)
        losses, metrics = objective.sums(rows, offsets, predicted)
        # Return sums, not means: their denominators are known only at the optimizer step.
        losses[objective.denominator].backward()
        sums.add_per_token(self.role, metrics)
        if advance:
            advance(len(rows), len(rows["tokens"].values))
        return {name: float(loss.detach()) for name, loss in losses.items()}

    def optim_step(
        self, denominators: Mapping[str, float], iteration: int, overrides: StepOverrides = CONFIGURED
    ) -> float | None:
        assert self.optimizer is not None
        if len(denominators) > 1 or overrides != StepOverrides(
            overrides.learning_rate, max_grad_norm=overrides.max_grad_norm
        ):
            raise UserError("PlainBackend steps on one objective, with a learning rate and max_grad_norm alone")
        (count,) = denominators.values()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate if overrides.learning_rate is None else overrides.learning_rate
        parameters = list(self.model.parameters())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self.optimizer.zero_grad()
        if not count:
            return None
        self.ranks.all_reduce_gradients(gradients, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.div_(count)
        longest = self.longest if overrides.max_grad_norm is None else overrides.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, longest)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self.model.state_dict().items()

    def load(self, folder: Path) -> None:
        with torch.no_grad():
            saved = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype)
            self.model.load_state_dict(saved.state_dict())

    def export(self, folder: Path, write: bool = True) -> None:
        if write:
            self.model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(self.path).save_pretrained(folder)
