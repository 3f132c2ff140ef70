"""The layout that ranks generate in: which of the ranks that train form a generation group, and who has which of its slices.

                       training tensor=4, generation tensor=2
rank                   0      1      2      3
trains                 q0     q1     q2     q3
interval               q0 q1  q0 q1  q2 q3  q2 q3      groups (0, 2), (1, 3): what a rank trains is part of what it generates with
neighbour, gather      q0 q1  q2 q3  q0 q1  q2 q3      groups (0, 1), (2, 3): ranks 1 and 2 have to have both

The groups among which one copy of the model is divided for generation are its micro data-parallel ranks: each decodes its own rows.
HybridFlow (arXiv 2409.19256) calls `interval` HybridFlow, `neighbour` HybridFlow-V; `gather` is what DeepSpeed-Chat does.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from braidrl.config.layout import ParallelLayout
from braidrl.errors import UserError

Grouping = Literal["interval", "neighbour", "gather"]


@dataclass(frozen=True)
class GenerationLayout:
    """Pipeline and tensor ranks of a generation group, and how groups are formed of a training layout's ranks.

    Without a `grouping` it is `interval` where the training layout can have that, else neighbours that receive only what they lack.
    """

    pipeline: int = 1
    tensor: int = 1
    grouping: Grouping | None = None

    @property
    def ranks(self) -> int:
        """Return how many ranks have one copy of the model."""
        return self.pipeline * self.tensor

    def nests(self, training: ParallelLayout) -> bool:
        """Return True where intervals exist: both axes of training are multiples of generation's."""
        return not (training.pipeline % self.pipeline or training.tensor % self.tensor)

    def at_intervals(self, training: ParallelLayout) -> bool:
        """Return True where groups lie at intervals."""
        return self.grouping == "interval" or (self.grouping is None and self.nests(training))

    def check(self, training: ParallelLayout, devices: int) -> None:
        """Raise UserError where these ranks, trained in this layout, cannot generate so."""
        if devices % self.ranks:
            axes = f"rollout.tensor={self.tensor}" + (f" times pipeline={self.pipeline}" if self.pipeline > 1 else "")
            raise UserError(
                f"{axes}: {devices} ranks generate, which it does not divide; write a number that divides {devices}"
            )
        axes = f"training has pipeline={training.pipeline}, tensor={training.tensor}"
        if self.grouping == "interval" and not self.nests(training):
            raise UserError(
                f"rollout.grouping=interval: {axes}, which pipeline={self.pipeline}, tensor={self.tensor} of rollout do not divide; "
                "write numbers that do, or remove it"
            )
        if self.grouping == "neighbour" and training.shard != "none":
            raise UserError(
                f"rollout.grouping=neighbour gathers each copy of the model among its own ranks, and shard={training.shard} divides it "
                "among all; write grouping=gather"
            )
        if self.grouping == "gather" and (training.shard != "full" or training.nodes > 1):
            raise UserError(
                f"rollout.grouping=gather gathers the model from all ranks, and shard={training.shard}, nodes={training.nodes} leaves "
                "copies of it; write shard=full and nodes=1, or grouping=interval"
            )

    def groups(self, training: ParallelLayout) -> Tensor:
        """Return the ranks of each group, (groups, pipeline, tensor); `training` has its `data` filled in."""
        p, d, s, t = training.pipeline, training.data or 1, training.sequence, training.tensor
        grid = torch.arange(p * d * s * t).view(p, d, s, t)
        if not self.at_intervals(training):
            return grid.movedim(0, 2).reshape(-1, self.pipeline, self.tensor)
        apart = grid.view(self.pipeline, p // self.pipeline, d, s, self.tensor, t // self.tensor)
        return apart.permute(2, 3, 1, 5, 0, 4).reshape(-1, self.pipeline, self.tensor)
