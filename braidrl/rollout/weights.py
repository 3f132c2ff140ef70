"""The engine's weights: the trainer's own, or a copy in another dtype that is refreshed at each publication."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from transformers import PreTrainedModel


class EngineWeights:
    """`model` is what generates. With the trainer's dtype it is the trainer's module itself: nothing is copied, ever."""

    def __init__(self, trained: PreTrainedModel, dtype: torch.dtype | None) -> None:
        self._trained = trained
        self.shared = dtype is None or dtype == trained.dtype
        self.model = trained if self.shared else _copy(trained, dtype)

    @torch.no_grad()
    def refresh(self) -> None:
        """Brings a copy up to date; shared weights always are."""
        if self.shared:
            return
        for target, source in zip(self.model.parameters(), self._trained.parameters(), strict=True):
            target.copy_(source)


def _copy(model: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """The same module with parameters in `dtype`; tied ones stay tied, and buffers keep their precision."""
    copies = {id(p): nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in model.parameters()}
    copied = deepcopy(model, copies)
    copied.config.dtype = dtype
    return copied.eval()
