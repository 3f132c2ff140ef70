"""The worker of an actor or a reference: a causal decoder that gives the log-probability of each action."""

from pathlib import Path
from typing import Any

from torch import Tensor

from braidrl.models.compute.log_probs import linear_log_probs
from braidrl.models.compute.packed import Packed
from braidrl.models.loading import load_decoder
from braidrl.models.objective import Objective
from braidrl.models.roles.base import RoleWorker
from braidrl.models.roles.likelihood import Likelihood


class DecoderWorker(RoleWorker):
    """Predicts `log_probs` and `entropy`, (A,) each, of the action tokens under the current weights."""

    def load_model(self, folder: Path, on_meta: bool = False) -> Any:
        """Return the model of a Hugging Face directory.

        Args:
            folder: The directory.
            on_meta: Make it without weights, which are filled in later.
        """
        return load_decoder(folder, self.dtype, on_meta=on_meta)

    def predict(self, packed: Packed, objective: Objective | Likelihood | None = None) -> dict[str, Tensor]:
        """Predict every action token of a micro-batch.

        Args:
            packed: Its N tokens, of which P are predicted.
            objective: What the gradients are for; None where there are none.

        Returns:
            `log_probs` and `entropy`, (P,) float32 or float64, in nats at the run's temperature.
        """
        hidden = self.hidden_states(packed)[packed.predictors]
        weight = self.model.get_output_embeddings().weight
        with_entropy_grad = objective is not None and objective.entropy_coef != 0
        temperature = self.config.rollout.temperature
        log_probs, entropy = linear_log_probs(hidden, weight, packed.targets, temperature, with_entropy_grad)
        return {"log_probs": log_probs, "entropy": entropy}
