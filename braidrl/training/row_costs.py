"""The costs of rows by which ranks and micro-batches get equal work: tokens, and the vision tower's work on images.

length, image_tokens of a row ──▶ length + image_tokens · (operations of the tower for a token of an image
                                                          / operations of the text part for a token)

The samples of a group refer to the same images, which a micro-batch encodes once: they stay together where that is
less work. A tower that is frozen encodes an image once, and costs nothing here while encoded images are kept.
"""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from braidrl.config import Config
from braidrl.data.packing import balanced_partition
from braidrl.data.rows import Rows
from braidrl.data.vision import IMAGE_TOKENS
from braidrl.training import operations
from braidrl.training.memory.footprint import model_shape
from braidrl.training.operations import MatrixSizes, TokenCounts
from braidrl.training.role_settings import settings_of


def image_token_cost(role: str, config: Config, trains: bool) -> float:
    """Return the operations of a role's vision tower for one token of an image, in units of those of its text part for
    one token, in a pass that `trains` or infers.
    """
    settings = settings_of(role, config)
    if not settings.trains_vision:
        # A frozen tower has no backward pass; that of the text part takes twice as many, with adapters as many.
        text_passes = (2 if settings.lora else 3) if trains else 1
        return 0.0 if config.data.images.kept_mib else tower_share(settings.model, settings.dtype) / text_passes
    return tower_share(settings.model, settings.dtype)


@cache
def tower_share(model: Path, dtype: torch.dtype) -> float:
    """Return the operations of a model's vision tower for an image's token over those of its text part for one."""
    shape = model_shape(model.expanduser(), dtype)
    sizes = MatrixSizes.of(shape.sizes, shape.parameters - shape.tower, False, shape.idle)
    of_text = operations.forward_operations(sizes, TokenCounts(1, 0, 0))
    return operations.tower_operations(shape, 1) / of_text


def balance_of(
    index: Rows, role: str | None, config: Config, trains: bool, ranks: int, whole_groups: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the costs (B,) int64 by which rows are balanced over `ranks` ranks of a role, and the groups (B,) that
    stay on one rank, if any.

    Costs are equal while lengths are unknown. The samples of a group stay together, besides for `whole_groups`, where
    the busiest rank then has less work, because it encodes their images once.
    """
    groups: Tensor | None = index["group"] if whole_groups else None
    if "length" not in index:
        return torch.ones(len(index), dtype=torch.int64), groups
    price = image_token_cost(role, config, trains) if role is not None and IMAGE_TOKENS in index else 0.0
    if not price or not index[IMAGE_TOKENS].any():
        return index["length"], groups
    alone, together = (row_costs(index, index["length"], price, whole) for whole in (False, True))
    if whole_groups or ranks == 1:
        return together, groups
    whole = balanced_partition(together.tolist(), ranks, groups=index["group"].tolist())
    busiest = max(int(together[part].sum()) for part in whole)
    spread = map(index.take, balanced_partition(alone.tolist(), ranks))
    if busiest <= max(int(row_costs(part, part["length"], price, True).sum()) for part in spread):
        return together, index["group"]
    return alone, None


def row_costs(rows: Rows, lengths: Tensor, price: float, together: bool) -> Tensor:
    """Return the tokens (B,) int64 of rows and of the work on their images, at `price` for a token of an image. Rows of
    a group that are computed `together` share it.
    """
    shares = torch.ones(len(rows))
    if together:
        _, group, counts = rows["group"].unique(return_inverse=True, return_counts=True)
        shares = 1 / counts[group]
    return lengths + (price * shares * rows[IMAGE_TOKENS]).round().long()
