"""Importing this module registers every algorithm that comes with Braid."""

from braidrl.algorithms import (  # noqa: F401
    advantages,
    aggregation,
    corrections,
    covariance_losses,
    gae,
    kl,
    policy_losses,
    responses,
    row_losses,
    selection,
    shaping,
    token_advantages,
    value_loss,
)
