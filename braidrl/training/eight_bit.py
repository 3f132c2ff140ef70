"""AdamW with moments of 8 bits, by bitsandbytes: codes of 256 values that share a scale.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization". Parameters of fewer than 4,096 numbers keep moments in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from braidrl.training.four_bit import import_bitsandbytes

BLOCK = 256
UNDIVIDED = ("absmax1", "absmax2", "qmap1", "qmap2")
"""State that is not of its parameter's shape: scales, and what the codes stand for."""
MOMENT_BYTES = 1 + torch.float32.itemsize / BLOCK
"""Bytes of one moment of one weight."""


def adamw8bit(parameters: Sequence[Tensor], lr: float, **settings: Any) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW8bit. Raises UserError where it is not installed."""
    base: Any = import_bitsandbytes("trainer.optimizer=adamw8bit").optim.AdamW8bit

    class AdamW8bit(base):
        """Counts its steps in tensors, as torch's optimizers do, so that checkpoints hold them."""

        def init_state(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            super().init_state(group, p, gindex, pindex)
            # Of each parameter its own: files hold no tensor twice.
            state = self.state[p]
            state.update({name: state[name].clone() for name in UNDIVIDED if name in state})

        def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            state = self.state[p]
            state["step"] = int(state["step"])
            super().update_step(group, p, gindex, pindex)
            state["step"] = torch.tensor(float(state["step"]))

    made: torch.optim.Optimizer = AdamW8bit(parameters, lr=lr, **settings)
    return made
