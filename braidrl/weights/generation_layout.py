"""The generation layout: which training ranks form a generation group, and which slices each rank holds.

                       training tensor=4, generation tensor=2
rank                   0      1      2      3
trains                 q0     q1     q2     q3
interval               q0 q1  q0 q1  q2 q3  q2 q3      groups (0, 2), (1, 3): a rank's training slice is part of its
                       generation slice
neighbour, gather      q0 q1  q2 q3  q0 q1  q2 q3      groups (0, 1), (2, 3): ranks 1 and 2 must hold both

The generation groups within one copy of the training model are micro data-parallel ranks: each decodes its own rows.
HybridFlow (arXiv 2409.19256) calls `interval` HybridFlow, `neighbour` HybridFlow-V; DeepSpeed-Chat does `gather`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from braidrl.config.config import RolloutConfig
from braidrl.config.layout import ParallelLayout
from braidrl.errors import UserError

Grouping = Literal["interval", "neighbour", "gather"]


@dataclass(frozen=True)
class GenerationLayout:
    """Pipeline and tensor ranks of a generation group, and the rule that forms groups of training ranks.

    Without a `grouping`: `interval` if the training layout allows it, else neighbours that receive only what they lack.
    """

    pipeline: int = 1
    tensor: int = 1
    grouping: Grouping | None = None

    @classmethod
    def of(cls, rollout: RolloutConfig) -> "GenerationLayout":
        """Return the shape of the configured engines."""
        return cls(rollout.pipeline, rollout.tensor, rollout.grouping)

    @property
    def ranks(self) -> int:
        """Return the number of ranks of one copy of the model."""
        return self.pipeline * self.tensor

    def nests(self, training: ParallelLayout) -> bool:
        """Return True if `interval` is possible: both training axes are multiples of generation's."""
        return not (training.pipeline % self.pipeline or training.tensor % self.tensor)

    def check(self, training: ParallelLayout, devices: int) -> None:
        """Raise UserError if ranks of this training layout cannot form these generation groups."""
        if devices % self.ranks:
            axes = f"rollout.tensor={self.tensor}" + (f" times pipeline={self.pipeline}" if self.pipeline > 1 else "")
            raise UserError(
                f"{axes}: {devices} ranks generate, which it does not divide; write a number that divides {devices}"
            )
        axes = f"training has pipeline={training.pipeline}, tensor={training.tensor}"
        if self.grouping == "interval" and not self.nests(training):
            raise UserError(
                f"rollout.grouping=interval: {axes}, which pipeline={self.pipeline}, tensor={self.tensor} of rollout "
                "do not divide; write numbers that do, or remove it"
            )
        if self.grouping == "neighbour" and training.shard != "none":
            raise UserError(
                "rollout.grouping=neighbour gathers each copy of the model among its own ranks, and "
                f"shard={training.shard} divides it among all; write grouping=gather"
            )
        if self.grouping == "gather" and (training.shard != "full" or training.nodes > 1):
            raise UserError(
                f"rollout.grouping=gather gathers the model from all ranks, and shard={training.shard}, "
                f"nodes={training.nodes} leaves copies of it; write shard=full and nodes=1, or grouping=interval"
            )

    def groups(self, training: ParallelLayout) -> Tensor:
        """Return the ranks of each group, (groups, pipeline, tensor); `training` has its `data` filled in."""
        p, d, s, t = training.pipeline, training.data or 1, training.token_ranks, training.tensor
        grid = torch.arange(p * d * s * t).view(p, d, s, t)
        if self.grouping not in ("interval", None) or (self.grouping is None and not self.nests(training)):
            return grid.movedim(0, 2).reshape(-1, self.pipeline, self.tensor)
        apart = grid.view(self.pipeline, p // self.pipeline, d, s, self.tensor, t // self.tensor)
        return apart.permute(2, 3, 1, 5, 0, 4).reshape(-1, self.pipeline, self.tensor)
