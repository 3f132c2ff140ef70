"""Importing this module registers every algorithm that comes with Braid."""

from braidrl.algorithms import (  # noqa: F401
    advantages,
    aggregation,
    corrections,
    gae,
    kl,
    policy_losses,
    responses,
    selection,
    shaping,
    value_loss,
)
