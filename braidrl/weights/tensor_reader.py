"""Sharded tensors of a checkpoint, read without running what a file says: its index names tensors, shapes and places, and nothing else.

torch's distributed checkpoints keep their index as a pickle (`.metadata`), which could call any function when it is loaded.
"""

import pickle
from pathlib import PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

NAMES = (
    "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)  # fmt: skip
KNOWN: dict[tuple[str, str], object] = {
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    **{("torch.distributed.checkpoint.metadata", name): getattr(metadata, name) for name in NAMES},
}


class IndexUnpickler(pickle.Unpickler):
    """Makes what describes tensors; raises UnpicklingError, in a line, for anything else that a pickle may name."""

    def find_class(self, module: str, name: str) -> Any:
        found = KNOWN.get((module, name))
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype) or found is torch.Size else None
        if found is None and module.startswith("pathlib") and name in ("Path", "PosixPath"):
            found = PurePosixPath
        if found is None:
            raise pickle.UnpicklingError(
                f"the index names {module}.{name}, which is no part of a description of tensors"
            )
        return found


class TensorReader(dcp.FileSystemReader):
    """Reads the tensors of a folder; torch reads the tensors themselves with `weights_only`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            found = IndexUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError("the index is no description of tensors")
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found
