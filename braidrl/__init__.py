"""Braid: reinforcement-learning post-training of language models. A row is a trajectory; stages add columns.

    from braidrl import Flow, Session, actor, advantage, loss, reward

The names for writing an algorithm are imported from here. Each is loaded at first use, so that `import braidrl` is
fast.
"""

import importlib
import os
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
    from braidrl.runtimes.restarts import train
    from braidrl.runtimes.session import Session

# oneDNN caches a kernel for each shape of operands, and torch an object around it, 1,024 of each by default. Packed
# rows have new shapes in every step: a run of a tiny model grew by 0.65 GiB. One step reuses only some tens. Both
# variables are read at first use.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "128")

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Flow",
    "Session",
    "actor",
    "advantage",
    "correction",
    "cost",
    "cost_critic",
    "critic",
    "load_config",
    "loss",
    "reference",
    "reward",
    "select",
    "shape",
    "train",
]
PLACES = {"Config": "config", "load_config": "config", "Session": "runtimes.session", "train": "runtimes.restarts"}
"""Modules of the names that `braidrl.flow` does not have."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'braidrl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"braidrl.{PLACES.get(name, 'flow')}"), name)
