"""The worker of a critic or a reward model: a decoder with a scalar head.

tokens     p  p  p  a1 a2 a3
values           v1 v2 v3            of the state before each action: read where the action is predicted
score                     s          of the row: read at its last token
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from braidrl.models.compute.packed import Packed
from braidrl.models.loading import load_scorer
from braidrl.models.objective import Objective
from braidrl.models.roles.base import RoleWorker
from braidrl.models.roles.likelihood import Likelihood


class ScalarWorker(RoleWorker):
    """Predicts `values` (A,), one per action token, and `scores` (B,), one per row."""

    def load_model(self, folder: Path, on_meta: bool = False) -> Any:
        return load_scorer(folder, self.dtype, fresh_head=self.train or self.is_copy, on_meta=on_meta)

    def predict(self, packed: Packed, objective: Objective | Likelihood | None = None) -> dict[str, Tensor]:
        hidden = self.hidden_states(packed)
        wanted = {"values": packed.predictors, "scores": packed.row_ends}
        if objective is not None:
            wanted = {name: places for name, places in wanted.items() if name in objective.loss.reads}
        return {name: self._head(hidden[places]) for name, places in wanted.items()}

    def _head(self, hidden: Tensor) -> Tensor:
        """Map (K, D) to (K,) in at least float32: returns and margins need more precision than bfloat16 has."""
        weight = self.model.score.weight
        dtype = hidden.dtype if hidden.element_size() >= 4 else hidden.float().dtype
        return (hidden.to(dtype) @ weight.to(dtype).T).squeeze(-1)
