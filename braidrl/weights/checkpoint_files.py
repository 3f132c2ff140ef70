"""Lazy readers of model and checkpoint files: a rank that shards a model reads only what it keeps.

skeleton on the meta device ─split─▶ its layers ─read one─▶ shard it
    ─▶ read the next ...  a rank holds its shards and one layer
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from braidrl.errors import UserError
from braidrl.weights.boxes import Box
from braidrl.weights.shards import box_of, shard_of

HEAD = "score.weight"
"""The head of a scalar model; it starts at zero if the directory has none."""


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a directory's safetensors files `stem*.safetensors`, by name. Raises UserError if damaged."""

    def __init__(self, folder: Path, stem: str = "model") -> None:
        self._files: dict[str, Any] = {}
        for path in sorted(folder.expanduser().glob(f"{stem}*.safetensors")):
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
        """Return a tensor's shape without reading the tensor."""
        return torch.Size(self._files[name].get_slice(name).get_shape())

    def block(self, name: str, box: Box) -> Tensor:
        """Return a block of a tensor; only this part of the file is read."""
        return box.of(self[name])


def block_in(files: Mapping[str, Tensor], name: str, parameter: Tensor) -> Tensor:
    """Return this rank's block of a saved tensor, sharded like `parameter`."""
    return files.block(name, box_of(parameter)) if isinstance(files, WeightFiles) else shard_of(files[name], parameter)


def shapes_in(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the tensors' shapes by name."""
    if isinstance(tensors, WeightFiles):
        return {name: tensors.shape(name) for name in tensors}
    return {name: tensor.shape for name, tensor in tensors.items()}


class ParameterReader:
    """Reads the parameters of modules on the meta device; a model that is already loaded needs no reads."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        boxes: Mapping[str, Box] | None = None,
        files: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Read from `folder`, or from `files` by the model's names; only a tensor's block in `boxes`, if any."""
        self._folder, self._boxes = folder, boxes or {}
        self._on_meta = {p: name for name, p in model.named_parameters() if p.is_meta}
        # Weak references: tied parameters stay tied, and a full tensor is freed once it is sharded.
        self._read: WeakValueDictionary[nn.Parameter, nn.Parameter] = WeakValueDictionary()
        self._files = (WeightFiles(folder) if files is None else files) if self._on_meta else {}

    def __call__(self, module: nn.Module) -> None:
        """Read the module's parameters that are on the meta device."""
        for part in module.modules():
            for leaf, parameter in part.named_parameters(recurse=False):
                if parameter not in self._on_meta:
                    continue
                loaded = self._read.get(parameter)
                if loaded is None:
                    name, shape = self._on_meta[parameter], parameter.shape
                    values = self._values(name, shape)
                    # Copy: the mapped tensor would change with the file. Only the copied part of the file is read.
                    copied = values.to(parameter.dtype, copy=True, memory_format=torch.contiguous_format)
                    loaded = self._read[parameter] = nn.Parameter(copied)
                setattr(part, leaf, loaded)

    def _values(self, name: str, shape: torch.Size) -> Tensor:
        """Return a tensor, or the requested block of it."""
        if name == HEAD and name not in self._files:
            return torch.zeros(shape)
        files, box = self._files, self._boxes.get(name)
        is_block = box is not None and isinstance(files, WeightFiles) and files.shape(name) == shape
        values = files.block(name, box) if is_block else files[name]  # type: ignore[attr-defined]
        if not is_block and values.shape != shape:
            raise of_another_shape(name, self._folder, values.shape, shape)
        return values if is_block or box is None else box.of(values)


def of_another_shape(name: str, folder: Path, stored: Sequence[int], expected: Sequence[int]) -> UserError:
    """Return the error of a tensor that has another shape in the files of a folder than its model has."""
    return UserError(
        f"model: {name} in the weights of {folder} is {tuple(stored)}, and by config.json it is {tuple(expected)}; "
        "copy both from one model"
    )
