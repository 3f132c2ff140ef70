"""Registration of every algorithm that comes with Braid: importing this module is enough."""

from braidrl.algorithms import (  # noqa: F401
    advantages,
    aggregation,
    corrections,
    covariance_losses,
    kl,
    policy_losses,
    ragged,
    row_losses,
    shaping,
    token_advantages,
    turn_advantages,
)
