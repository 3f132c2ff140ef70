"""The engine's weights: the trainer's own, or a copy in another dtype that is refreshed at each publication."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from braidrl.engines.embedded.sharded_decoding import Slices
from braidrl.engines.engine import WeightSource


class EngineWeights:
    """The weights that generate: the trainer's module itself, without any copy, or a copy in another dtype.

    `slices` describes a module that holds one rank's part of a model.
    """

    def __init__(self, trained: PreTrainedModel, dtype: torch.dtype | None, slices: Slices | None = None) -> None:
        """Share the trained weights, or keep copies where the dtype differs.

        Args:
            trained: The model that is trained.
            dtype: Of the engine's weights; None is the trained model's.
            slices: This rank's part of each tensor, where ranks divide the model.
        """
        self._trained, self._slices = trained, slices
        self.shared = dtype is None or dtype == trained.dtype
        self.model = trained if self.shared else _copy(trained, dtype)

    @torch.no_grad()
    def refresh(self, source: WeightSource | None = None) -> None:
        """Take the tensors of `source`, or update a copy from the trainer; shared weights are always current.

        Raises ValueError, before anything changes, where the source's tensors are not exactly the model's.
        """
        if source is not None:
            self.take(self.checked(source))
            return
        if self.shared:
            return
        for target, source in zip(self.model.parameters(), self._trained.parameters(), strict=True):
            target.copy_(source)

    def checked(self, source: WeightSource) -> dict[str, Tensor]:
        """Return the full tensors of a source. Raises ValueError where they are not exactly the model's."""
        given = dict(source.tensors())
        own = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        check_shapes({n: t.shape for n, t in given.items()}, own if self._slices is None else self._slices.shapes)
        return given

    @torch.no_grad()
    def take(self, given: Mapping[str, Tensor]) -> None:
        """Copy the local part of every tensor by its name, tied ones under each of theirs."""
        targets = self.model.state_dict()
        for name, tensor in given.items():
            targets[name].copy_(tensor if self._slices is None else self._slices.boxes[name].of(tensor))


def check_shapes(given: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> None:
    """Raise ValueError where these shapes are not exactly those of the model."""
    differing = sorted(expected.keys() ^ given.keys()) or [n for n, shape in given.items() if shape != expected[n]]
    if differing:
        raise ValueError(f"the weights given are not those of this model: {', '.join(differing[:3])} differ")


def shapes_of(folder: Path) -> dict[str, torch.Size]:
    """Return the shape of every tensor of the model in a directory, a tied one under each of its names; reads no weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def _copy(model: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """Copy a module with parameters in `dtype`; tied ones stay tied, and buffers keep their precision."""
    copies = {id(p): nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in model.parameters()}
    copied = deepcopy(model, copies)
    copied.config.dtype = dtype
    return copied.eval()
