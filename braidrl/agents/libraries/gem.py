"""Environments of gem-llm, such as `gem:game:GuessTheNumber-v0-easy`."""

import importlib
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from braidrl.agents.turns import Observation
from braidrl.errors import UserError, suggest

# gem uses the process's random state, which all of its environments share.
LOCK = threading.Lock()


def environment(name: str, settings: Mapping[str, Any]) -> Callable[[], "GemEnvironment"]:
    """Return a factory of a gem environment. Raises UserError if gem has no environment of this name."""
    load_gem()
    known = importlib.import_module("gem.envs.registration").ENV_REGISTRY
    if name not in known:
        raise UserError(f"gem has no environment {name!r}. {suggest(name, known)}")
    return partial(GemEnvironment, name, dict(settings))


@dataclass
class GemEnvironment:
    """A gem environment with its own random state, independent of others in the process."""

    name: str
    settings: Mapping[str, Any]
    _random: tuple[Any, Any] | None = None
    _environment: Any = None

    def reset(self, example: dict[str, Any]) -> str:
        """Start with the example's seed, and return the instructions."""
        with self._own_random_numbers():
            self._environment = load_gem().make(self.name, **self.settings)
            instructions, info = self._environment.reset(seed=example["seed"])
        return "\n".join(filter(None, (instructions, info.get("suffix"))))

    def step(self, text: str) -> Observation:
        with self._own_random_numbers():
            said, reward, terminated, truncated, info = self._environment.step(text)
        # gem's request for the next action is apart from its observation.
        said = "\n".join(filter(None, (said, info.get("suffix"))))
        return Observation(said, float(reward), bool(terminated or truncated))

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        with LOCK:
            outside = (random.getstate(), np.random.get_state())
            if self._random is not None:
                random.setstate(self._random[0])
                np.random.set_state(self._random[1])
            try:
                yield
            finally:
                self._random = (random.getstate(), np.random.get_state())
                random.setstate(outside[0])
                np.random.set_state(outside[1])


def load_gem() -> ModuleType:
    """Import gem with its environments registered, and restore the process's logging afterwards."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    try:
        importlib.import_module("gem.envs")
        return importlib.import_module("gem")
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]
