"""A user-defined optimizer: Lion, which keeps one moment and steps by its sign (Chen et al., 2023, arXiv
2302.06675).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """An optimizer chosen by `trainer.optimizer: examples/plugins/optimizer.py:Lion`.

    It needs about a tenth of AdamW's learning rate.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], lr: float, betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (fast, slow), rate = group["betas"], group["lr"]
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                moment = state.setdefault("moment", torch.zeros_like(weights))
                weights.sub_(torch.lerp(weights.grad, moment, fast).sign(), alpha=rate)
                moment.lerp_(weights.grad, 1 - slow)
