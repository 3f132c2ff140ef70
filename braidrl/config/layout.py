"""The parallel layout of a role: four axes that multiply to the number of devices, and what is sharded among them.

rank = ((pipeline · data + data rank) · sequence + sequence rank) · tensor + tensor rank          tensor varies fastest
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from braidrl.config.section import MOST_PROCESSES
from braidrl.errors import UserError

AXES = ("pipeline", "data", "sequence", "tensor")
"""Names of the mesh dimensions, slowest first: ranks that communicate most are neighbours."""


class ParallelLayout(BaseModel):
    """Devices along each axis. By default each device holds a replica of the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pipeline: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Pipeline ranks, each with as many of the layers, through which micro-batches pass one behind the other."""
    tensor: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Devices that divide each matrix and the vocabulary, and between matrices, in norms and residuals, the tokens."""
    data: int | None = Field(None, ge=1, le=MOST_PROCESSES)
    """Devices that divide the rows; by default as many as the other axes leave."""
    sequence: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Devices that divide the tokens of each micro-batch, and in attention the heads (Ulysses)."""
    shard: Literal["full", "optimizer", "none"] = "none"
    """What the ranks along `data` and `sequence` divide: weights, gradients and optimizer state (`full`: FSDP, ZeRO-3), the last two
    (`optimizer`: ZeRO-2, the weights are whole while a batch is computed), or nothing."""
    nodes: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Groups of ranks along `data` that each have all shards: weights are gathered within a node, gradients alone cross between nodes."""

    @property
    def ranks_per_replica(self) -> int:
        """Devices that hold one replica of the model together and compute the same rows."""
        return self.pipeline * self.tensor * self.sequence

    @property
    def is_replicated(self) -> bool:
        """Return True where every device has a full replica of the model."""
        return self.ranks_per_replica == 1 and self.shard == "none"

    def resolve(self, devices: int, key: str = "trainer.layout", devices_key: str = "workers") -> "ParallelLayout":
        """Return the layout with `data` filled in. Raises UserError, naming both keys, where the axes do not multiply to the devices."""
        data = self.data or max(1, devices // self.ranks_per_replica)
        filled = self.model_copy(update={"data": data})
        if data * self.ranks_per_replica != devices:
            product = " · ".join(f"{axis} {getattr(filled, axis)}" for axis in AXES)
            raise UserError(
                f"{key}: {product} make {data * self.ranks_per_replica} devices and there are {devices}; "
                f"write numbers that multiply to {devices}, or {devices_key}={data * self.ranks_per_replica}"
            )
        if self.nodes > 1 and (self.shard == "none" or data % self.nodes):
            why = f"does not divide data {data}" if data % self.nodes else "has no shards"
            raise UserError(
                f"{key}: nodes={self.nodes} {why}; write shard=full and a number of nodes that divides data"
            )
        return filled

    @property
    def shard_ranks(self) -> int:
        """Devices among which weights, gradients or optimizer state are sharded, once `data` is filled in."""
        return 1 if self.shard == "none" else (self.data or 1) * self.sequence // self.nodes

    def check_model(self, heads: int, key_value_heads: int, layers: int, key: str = "trainer.layout") -> None:
        """Raise UserError, naming `key`, where the axes do not divide a model's heads or layers."""
        for name, count in (("attention heads", heads), ("key/value heads", key_value_heads)):
            if count % (self.tensor * self.sequence):
                raise UserError(
                    f"{key}: the model has {count} {name}, which tensor={self.tensor} times sequence={self.sequence} does not "
                    f"divide; write numbers whose product divides {count}"
                )
        if layers % self.pipeline:
            raise UserError(
                f"{key}: the model has {layers} layers, which pipeline={self.pipeline} does not divide; "
                f"write a number that divides {layers}"
            )
