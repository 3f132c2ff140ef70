"""AdamW with 8-bit moments by bitsandbytes: blocks of 256 codes share a scale.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization". Parameters of fewer than 4,096 numbers keep moments in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from braidrl.training.four_bit import import_bitsandbytes

BLOCK = 256
UNDIVIDED = ("absmax1", "absmax2", "qmap1", "qmap2")
"""State that does not have its parameter's shape: scales and code tables."""
MOMENT_BYTES = 1 + torch.float32.itemsize / BLOCK
"""Bytes of one moment per weight."""


def adamw8bit(parameters: Sequence[Tensor], lr: float, **settings: Any) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW8bit. Raises UserError if it is not installed."""
    base: Any = import_bitsandbytes("trainer.optimizer=adamw8bit").optim.AdamW8bit

    class AdamW8bit(base):
        """AdamW8bit with step counts as tensors, as in torch's optimizers, so that checkpoints contain them."""

        def init_state(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            super().init_state(group, p, gindex, pindex)
            # Clone: safetensors files cannot store shared tensors.
            state = self.state[p]
            state.update({name: state[name].clone() for name in UNDIVIDED if name in state})

        def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            state = self.state[p]
            state["step"] = int(state["step"])
            super().update_step(group, p, gindex, pindex)
            state["step"] = torch.tensor(float(state["step"]))

    return AdamW8bit(parameters, lr=lr, **settings)
