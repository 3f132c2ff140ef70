"""The weights of ranks that train and generate in turn: those of one phase give way to those of the other.

            training              generation                              training
interval    own slice ─copied──▶ [own slice | received blocks] ─copied─▶ own slice       nothing lies there twice
neighbour   own slice ────────── own slice, [whole model ─cut─▶ slices] ─ own slice      gathered among the ranks of one copy
gather      own shard ────────── own shard, [whole model ─cut─▶ slices] ─ own shard      gathered among all ranks

What generation alone needs is freed while ranks train.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from braidrl.engines.embedded.sharded_decoding import Slices
from braidrl.training.memory.offload import empty, occupy, storages
from braidrl.training.role_settings import layout_of
from braidrl.training.roles.base import RoleWorker
from braidrl.weights.boxes import Box
from braidrl.weights.generation_layout import GenerationLayout
from braidrl.weights.mirror import local_weight_parts
from braidrl.weights.reshard_plan import TensorGroup
from braidrl.weights.transfer import LIMIT_BYTES, TransferVolume, WeightTransfer
from braidrl.weights.weight_index import WeightIndex, WeightPart, gather_weight_index, weight_parts


class GenerationWeights:
    """One rank's generation weights, in device memory only while it generates; all ranks enter at the same time."""

    def __init__(
        self, worker: RoleWorker, model: nn.Module, slices: Slices, layout: GenerationLayout,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:  # fmt: skip
        """Plan the transfer, and free the generation weights.

        Args:
            worker: Trains, and has the weights outside generation.
            model: This rank's module for generation.
            slices: The slices of the full tensors that it has.
            layout: Of the ranks that generate; its grouping says what is received.
            limit_bytes: Bytes that a rank sends, or receives, in one round.
        """
        self._worker, self._model, self._slices = worker, model, slices
        training = layout_of(worker.role, worker.config).resolve(worker.ranks.size)
        self._gathers = layout.grouping in ("neighbour", "gather")
        # Of the copies of a block that in the rank's own copy of the model is taken.
        copy = worker.ranks.rank // (training.tensor * training.sequence) % (training.data or 1)
        parts, wanted = local_weight_parts(worker), weight_parts(model, slices)
        self._known = gather_weight_index(parts, worker.ranks, str(copy) if layout.grouping == "neighbour" else "")
        groups = (
            gathered(self._known, worker.ranks.size)
            if self._gathers
            else self._known.groups(gather_weight_index(wanted, worker.ranks))
        )
        self.transfer = WeightTransfer(self._known, groups, worker.ranks, limit_bytes)
        shares = not self._gathers and training.shard == "none"
        self._shared = [name for name, part in wanted.items() if shares and lies_in(parts.get(name), part)]
        self.peak_bytes = 0
        self.generating = True
        self._free()

    @property
    def redundant_bytes(self) -> int:
        """Bytes of weights that lie in memory beside the generation weights during generation."""
        return sum(part.local.nbytes for name, part in self._trained.items() if name not in self._shared)

    @property
    def _trained(self) -> Mapping[str, WeightPart]:
        return local_weight_parts(self._worker)

    @torch.no_grad()
    def enter(self) -> TransferVolume | None:
        """Bring the current weights to the layout of generation; all ranks call this at the same time. None where they are there."""
        if self.generating:
            return None
        self.generating = True
        return self._gather() if self._gathers else self._receive()

    @torch.no_grad()
    def leave(self) -> None:
        """Give the device back to training. No rank waits for another."""
        if not self.generating:
            return
        generated, trained = weight_parts(self._model, self._slices), self._trained
        for name in self._shared:
            own = trained[name]
            occupy(own.local.untyped_storage(), self._occupied[name])
            own.local.copy_(generated[name].block(own.box))
        self._free()

    def _free(self) -> None:
        """Free the generation weights; their storages stay the same."""
        self._storages = [(storage, storage.nbytes()) for storage in storages(self._model.parameters())]
        for storage, _ in self._storages:
            empty(storage)
        self.generating = False

    def _receive(self) -> TransferVolume:
        """Copy the own slices to where they lie in generation, free those of training, and receive the rest."""
        generated, trained = weight_parts(self._model, self._slices), dict(self._trained)
        in_storage: dict[int, list[str]] = {}
        for name in self._shared:
            in_storage.setdefault(generated[name].local.untyped_storage()._cdata, []).append(name)
        self._occupied = {name: trained[name].local.untyped_storage().nbytes() for name in self._shared}
        there = self.peak_bytes = sum(trained[name].local.nbytes for name in self._shared)
        # The largest first: a slice is there twice while it is copied, which counts most at the end.
        for storage, size in sorted(self._storages, key=lambda one: -one[1]):
            occupy(storage, size)
            there += size
            self.peak_bytes = max(self.peak_bytes, there)
            for name in in_storage.get(storage._cdata, ()):
                own = trained[name]
                generated[name].block(own.box).copy_(own.local)
                empty(own.local.untyped_storage())
                there -= own.local.nbytes
                trained[name] = own.lying_in(generated[name])
        return self.transfer.run(trained, generated)

    def _gather(self) -> TransferVolume:
        """Gather every tensor, then cut the slices out."""
        generated = weight_parts(self._model, self._slices)
        device = next(self._model.parameters()).device
        whole = {
            name: torch.empty(shape, dtype=self._known.dtypes[name], device=device)
            for name, shape in self._known.shapes.items()
        }
        volume = self.transfer.run(self._trained, {name: WeightPart([name], tensor) for name, tensor in whole.items()})
        there = self.peak_bytes = sum(tensor.nbytes for tensor in whole.values())
        for name in whole.keys() - generated.keys():
            there -= whole.pop(name).nbytes
        by_storage: dict[int, list[str]] = {}
        for name, part in generated.items():
            by_storage.setdefault(part.local.untyped_storage()._cdata, []).append(name)
        for storage, size in sorted(self._storages, key=lambda one: one[1]):
            occupy(storage, size)
            there += size
            self.peak_bytes = max(self.peak_bytes, there)
            for name in by_storage[storage._cdata]:
                part = generated[name]
                part.local.copy_(part.box.of(whole[name]))
                there -= whole.pop(name).nbytes
        return volume


def lies_in(trained: WeightPart | None, generated: WeightPart) -> bool:
    """Return True where what a rank trains can lie in the tensor that it generates with."""
    return (
        trained is not None
        and isinstance(trained.tensor, torch.Tensor)
        and trained.tensor.dtype == generated.tensor.dtype
        and trained.box.overlap(generated.box) == trained.box
    )


def gathered(known: WeightIndex, ranks: int) -> list[TensorGroup]:
    """Return the tensors, of which every rank wants all."""
    groups = known.groups()
    return [replace(one, wanted=[(rank, Box.whole(one.shape)) for rank in range(ranks)]) for one in groups]
