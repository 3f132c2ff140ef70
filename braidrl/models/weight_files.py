"""A model directory's tensors, each read when it is asked for: ranks that divide a model read no more than they keep.

skeleton on the meta device ──cut──▶ own layers ──fill one──▶ divide it ──▶ fill the next ...        a rank holds its parts and one layer
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from braidrl.errors import UserError
from braidrl.models.parallel.boxes import Box

HEAD = "score.weight"
"""Of a scorer: where there is none in its directory it begins as zero."""


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a directory's safetensors files by name. Raises UserError for a file that is damaged."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for path in sorted(folder.expanduser().glob("model*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"model: {path} cannot be read: {error}; copy it whole") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> torch.Size:
        """Of a tensor that is not read for it."""
        return torch.Size(self._files[name].get_slice(name).get_shape())


def shapes_in(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Of each tensor by its name."""
    if isinstance(tensors, WeightFiles):
        return {name: tensors.shape(name) for name in tensors}
    return {name: tensor.shape for name, tensor in tensors.items()}


class Filling:
    """Gives modules of a model what its directory has for them; of one that was loaded whole, nothing is left to be given."""

    def __init__(self, folder: Path, model: nn.Module, boxes: Mapping[str, Box] | None = None) -> None:
        """Of a tensor that has one of `boxes` only this part is read, and given."""
        self._folder, self._boxes = folder, boxes or {}
        self._unread = {p: name for name, p in model.named_parameters() if p.is_meta}
        # Known as long as they are whole, so that tied ones stay tied and none is kept beside its parts.
        self._read: WeakValueDictionary[nn.Parameter, nn.Parameter] = WeakValueDictionary()
        self._files = WeightFiles(folder) if self._unread else {}

    def __call__(self, module: nn.Module) -> None:
        """Reads what of a module's parameters is on the meta device."""
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if parameter in self._unread:
                    setattr(part, name, self._filled(parameter))

    def _filled(self, parameter: nn.Parameter) -> nn.Parameter:
        found = self._read.get(parameter)
        if found is None:
            found = self._read[parameter] = nn.Parameter(self._values(self._unread[parameter], parameter))
        return found

    def _values(self, name: str, parameter: nn.Parameter) -> Tensor:
        if name == HEAD and name not in self._files:
            return torch.zeros(parameter.shape, dtype=parameter.dtype)
        values = self._files[name]
        if values.shape != parameter.shape:
            raise UserError(f"model: {name} in {self._folder} is {tuple(values.shape)}, not {tuple(parameter.shape)}")
        if name in self._boxes:
            values = self._boxes[name].of(values)
        # A copy: what the file shows would change with it. No more of the file is read than is copied.
        return values.to(parameter.dtype, copy=True, memory_format=torch.contiguous_format)
