"""Weights of an engine in its trainer's process: the same tensors if dtype and slices are equal, else a copy in rounds.

            training             generation                              training
shared      module ───────────── the same module ─────────────────────── module
interval    own slice ─copied─▶ [own slice | received blocks] ─copied─▶ own slice   nothing is held twice
neighbour   own slice ───────── own slice, [whole model ─cut─▶ slices] ─ own slice  gathered among the ranks of one copy
gather      own shard ───────── own shard, [whole model ─cut─▶ slices] ─ own shard  gathered among all ranks

Memory that only generation needs is freed while ranks train.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, UntypedStorage
from transformers import PreTrainedModel

from braidrl.cluster.world import Ranks
from braidrl.config.layout import ParallelLayout
from braidrl.weights.boxes import Box
from braidrl.weights.collective import Incoming, OfferedWeights
from braidrl.weights.file import ALIGNED, WeightFile
from braidrl.weights.generation_layout import GenerationLayout
from braidrl.weights.publisher import PublishedEngine, TransferVolume, WeightSource, check_shapes
from braidrl.weights.reshard_plan import gather_shard_index
from braidrl.weights.shards import Parts, empty, occupy, storages, weight_parts
from braidrl.weights.transfer import LIMIT_BYTES, LayoutCopy, WeightTransfer


@dataclass
class InPlacePublisher:
    """A publisher for an engine of this process: it shares the trainer's weights, or has copies."""

    engine: PublishedEngine | None
    """None on a rank that only sends to other ranks."""
    copy: LayoutCopy | None = None
    """Copies this rank's slices into the engine's model."""
    source: WeightSource | None = None
    """Provides every full tensor by name, for an engine without slices."""

    def publish(self, version: int) -> TransferVolume | None:
        moved = self.copy.refresh() if self.copy is not None else None
        if self.engine is not None:
            self.engine.publish(version, self.source)
        return moved

    def close(self) -> None:
        """Do nothing: engine and trainer own the memory."""


@dataclass(frozen=True)
class EngineWeights:
    """The weights of an engine's separate module, or the trainer's weights, which are always current."""

    model: PreTrainedModel

    @torch.no_grad()
    def refresh(self, source: WeightSource | None = None) -> None:
        """Load the tensors of `source`, if any.

        Raises ValueError, before any change, if they are not exactly the model's.
        """
        targets = self.model.state_dict(keep_vars=True)
        shapes = {name: tensor.shape for name, tensor in targets.items()}
        if isinstance(source, OfferedWeights):
            with source.request(1) as notice:
                Incoming(notice, 0, self.model.device).put_into(weight_parts(self.model), shapes)
        elif isinstance(source, Incoming):
            source.put_into(weight_parts(self.model), shapes)
        elif source is not None:
            tensors = dict(source.tensors())
            check_shapes({name: tensor.shape for name, tensor in tensors.items()}, shapes)
            for name, tensor in tensors.items():
                target = targets[name]
                same = target.device == tensor.device and target.dtype == tensor.dtype
                # The engine uses the file's pages, which no process changes, if they are aligned as torch's memory.
                if isinstance(source, WeightFile) and same and tensor.data_ptr() % ALIGNED == 0:
                    target.data = tensor
                else:
                    target.copy_(tensor)


class GenerationWeights:
    """One rank's generation weights, in device memory only during generation; all ranks enter at the same time."""

    def __init__(
        self,
        trained: Parts,
        training: ParallelLayout,
        ranks: Ranks,
        generated: Parts,
        layout: GenerationLayout,
        limit_bytes: int = LIMIT_BYTES,
        occupy: Callable[[UntypedStorage, int], None] = occupy,
        empty: Callable[[UntypedStorage], None] = empty,
    ) -> None:
        """Plan the transfer, and free the generation weights.

        `trained` parts hold the weights outside generation. `training` has its `data` filled in; the grouping of
        `layout` decides what a rank receives, at most `limit_bytes` in one round. `occupy` allocates a generation
        storage again, which `empty` has freed.
        """
        self._trained, self._generated, self._occupy, self._empty = trained, generated, occupy, empty
        self._gathers = layout.grouping in ("neighbour", "gather")
        # With `neighbour`, a rank reads blocks from its copy of the model: label ranks by copy.
        copy = ranks.rank // (training.tensor * training.token_ranks) % (training.data or 1)
        parts, to_fill = trained(), generated()
        index = gather_shard_index(parts, ranks, str(copy) if layout.grouping == "neighbour" else "")
        groups = index.groups(None if self._gathers else gather_shard_index(to_fill, ranks))
        if self._gathers:
            every = range(ranks.size)
            groups = [replace(group, wanted=[(rank, Box.whole(group.shape)) for rank in every]) for group in groups]
        self.transfer = WeightTransfer(index, groups, ranks, limit_bytes)
        shares = not self._gathers and training.shard == "none"
        # A training slice is stored inside the generation tensor if that contains it.
        self._shared = [
            name
            for name, part in to_fill.items()
            if shares
            and (trained_part := parts.get(name)) is not None
            and isinstance(trained_part.tensor, Tensor)
            and trained_part.tensor.dtype == part.tensor.dtype
            and trained_part.box.overlap(part.box) == trained_part.box
        ]
        self.peak_bytes = 0
        self.generating = True
        self._free()

    @property
    def redundant_bytes(self) -> int:
        """The bytes of training weights held during generation in addition to the generation weights."""
        return sum(part.local.nbytes for name, part in self._trained().items() if name not in self._shared)

    @torch.no_grad()
    def enter(self) -> TransferVolume | None:
        """Bring the current weights to the generation layout; all ranks call this at the same time.

        Returns None if the weights are already there. Otherwise gather every tensor and cut the slices out, or copy
        training slices into the generation tensors, free the originals, and receive the missing blocks.
        """
        if self.generating:
            return None
        self.generating = True
        generated, trained, full = self._generated(), dict(self._trained()), dict[str, Tensor]()
        in_storage: dict[int, list[str]] = {}
        for name, part in generated.items():
            in_storage.setdefault(part.local.untyped_storage()._cdata, []).append(name)
        if self._gathers:
            device = next(iter(generated.values())).tensor.device
            tensors = self.transfer.index.tensors
            full = {name: torch.empty_like(part.local, device=device) for name, part in tensors.items()}
            self.transfer.run(trained, weight_parts(full))
        self._occupied = {name: trained[name].local.untyped_storage().nbytes() for name in self._shared}
        there = self.peak_bytes = sum(
            tensor.nbytes for tensor in (*full.values(), *(trained[name].local for name in self._shared))
        )
        for name in full.keys() - generated.keys():
            there -= full.pop(name).nbytes
        # Largest first: a slice exists twice while it is copied, which matters most when memory is nearly full.
        for storage, size in sorted(self._storages, key=lambda pair: pair[1], reverse=not self._gathers):
            self._occupy(storage, size)
            there += size
            self.peak_bytes = max(self.peak_bytes, there)
            for name in in_storage[storage._cdata]:
                part = generated[name]
                if self._gathers:
                    part.put_blocks(full[name])
                    there -= full.pop(name).nbytes
                elif name in self._shared:
                    shard = trained[name]
                    part.block(shard.box).copy_(shard.local)
                    there -= shard.local.nbytes
                    trained[name] = replace(shard.merged(), tensor=part.block(shard.box))
                    empty(shard.local.untyped_storage())
        return self.transfer.traffic if self._gathers else self.transfer.run(trained, generated)

    @torch.no_grad()
    def leave(self) -> None:
        """Return device memory to training, without communication."""
        if not self.generating:
            return
        generated, trained = self._generated(), self._trained()
        for name in self._shared:
            shard = trained[name]
            occupy(shard.local.untyped_storage(), self._occupied[name])
            shard.local.copy_(generated[name].block(shard.box))
        self._free()

    def _free(self) -> None:
        """Free the generation weights; their storage objects stay the same."""
        self._storages = [(s, s.nbytes()) for s in storages(part.local for part in self._generated().values())]
        for storage, _ in self._storages:
            self._empty(storage)
        self.generating = False
