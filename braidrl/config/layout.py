"""The parallel layout of a role: five axes whose product is the number of devices, and sharding over them.

ranks are ordered by (pipeline, data, context, sequence, tensor); tensor varies fastest
"""

from typing import Literal

from pydantic import Field

from braidrl.config.section import MOST_PROCESSES, Section
from braidrl.errors import UserError

AXES = ("pipeline", "data", "context", "sequence", "tensor")
"""Names of the mesh dimensions, slowest first, so that ranks with the most communication are neighbours."""


class ParallelLayout(Section):
    """Number of devices along each axis. By default each device holds a replica of the model."""

    pipeline: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Pipeline parallelism: number of ranks with an equal share of the layers."""
    tensor: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Tensor parallelism: number of devices that shard each matrix and the vocabulary, and the tokens in norms and
    residuals.
    """
    data: int | None = Field(None, ge=1, le=MOST_PROCESSES)
    """Data parallelism: number of devices that shard the rows; by default the number of devices divided by the other
    axes.
    """
    sequence: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Sequence parallelism: number of devices that shard the tokens of each micro-batch, and in attention the heads
    (Ulysses).
    """
    context: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Context parallelism: number of devices that shard the tokens of each micro-batch, for rows longer than
    `sequence` allows. In attention each gathers the keys and values of all; heads need not be divisible.
    """
    shard: Literal["full", "optimizer", "none"] = "none"
    """Sharding over the ranks of `data`, `context` and `sequence`. `full`: weights, gradients and
    optimizer state (FSDP, ZeRO-3). `optimizer`: gradients and optimizer state (ZeRO-2). `none`: nothing.
    """
    expert: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Expert parallelism: number of devices that shard the experts of a mixture, and exchange tokens. They are taken
    from the devices of `data`, `context`, `sequence` and `tensor`, and must divide their product.
    """
    nodes: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Hybrid sharding: number of groups of ranks along `data` with full shards each; only gradients cross between
    groups.
    """

    @property
    def ranks_per_replica(self) -> int:
        """Return the number of devices that hold one replica of the model and compute the same rows."""
        return self.pipeline * self.tensor * self.token_ranks

    @property
    def token_ranks(self) -> int:
        """Return the number of devices that shard the tokens of a replica's micro-batch, outside of `tensor`."""
        return self.context * self.sequence

    @property
    def is_replicated(self) -> bool:
        """Return True if every device has a full replica of the model."""
        return self.ranks_per_replica == 1 and self.shard == "none" and self.expert == 1

    def resolve(self, devices: int, key: str = "trainer.layout", devices_key: str = "workers") -> "ParallelLayout":
        """Return the layout with `data` filled in.

        Raises UserError, with both keys, if the product of the axes is not `devices`.
        """
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
            raise UserError(f"{key}: nodes={self.nodes} {why}; write shard=full and nodes that divide data")
        within = data // self.nodes * self.token_ranks * self.tensor
        if within % self.expert:
            raise UserError(
                f"{key}: expert={self.expert} does not divide the {within} devices of data, context, sequence and "
                "tensor" + (" in a node" if self.nodes > 1 else "") + f"; write a number that divides {within}"
            )
        return filled

    @property
    def shard_ranks(self) -> int:
        """Return the number of devices over which weights, gradients or optimizer state are sharded; `data` must be
        filled in.
        """
        return 1 if self.shard == "none" else (self.data or 1) * self.token_ranks // self.nodes

    def check_model(self, heads: int, key_value_heads: int, layers: int, key: str = "trainer.layout") -> None:
        """Raise UserError, with `key`, if the axes do not divide a model's heads or layers."""
        for name, count in (("attention heads", heads), ("key/value heads", key_value_heads)):
            if count % (self.tensor * self.sequence):
                raise UserError(
                    f"{key}: the model has {count} {name}, which tensor={self.tensor} times sequence={self.sequence} "
                    f"does not divide; write numbers whose product divides {count}"
                )
        if layers % self.pipeline:
            raise UserError(
                f"{key}: the model has {layers} layers, which pipeline={self.pipeline} does not divide; "
                f"write a number that divides {layers}"
            )
