"""Registration of every algorithm that comes with Braid: importing this module is enough."""

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
