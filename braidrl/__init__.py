"""Braid: reinforcement-learning post-training of language models. Rows are trajectories, columns are what stages write.

    from braidrl import Flow, Session, actor, advantage, loss, reward

What an algorithm is written with is imported from here; it is loaded when it is first asked for, so that `import braidrl` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from braidrl.config import Config, load_config
    from braidrl.flow import (
        Flow,
        actor,
        advantage,
        correction,
        cost,
        cost_critic,
        critic,
        loss,
        reference,
        reward,
        select,
        shape,
    )
    from braidrl.runtimes.run import train
    from braidrl.runtimes.session import Session

__version__ = "0.1.0"
__all__ = [
    "Config", "Flow", "Session", "actor", "advantage", "correction", "cost", "cost_critic", "critic", "load_config", "loss", "reference",
    "reward", "select", "shape", "train",
]  # fmt: skip
PLACES = {"Config": "config", "load_config": "config", "Session": "runtimes.session", "train": "runtimes.run"}
"""Modules of names that are not in `braidrl.flow`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'braidrl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"braidrl.{PLACES.get(name, 'flow')}"), name)
