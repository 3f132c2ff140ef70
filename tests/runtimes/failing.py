"""User-defined stages that fail on one rank."""

import os

from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import shapes


@shapes.register(writes=["reward"])
def fails_on_rank_1(reward, rollout_log_probs: Ragged):
    """Read payload, so that each rank gets its own rows."""
    if os.environ.get("RANK") == "1":
        # As a defect of Braid, which ends with its traceback; one of a user ends in a line. Set on this rank alone,
        # because tests in the main process list Braid's functions.
        fails_on_rank_1.__module__ = "braidrl.failing"
        raise ValueError("no such luck")
    return reward
