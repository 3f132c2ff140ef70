"""Imports of the tests' fork server at its start: everything that the tests' ranks, workers and commands need, which
are its copies.
"""

from __future__ import annotations

import gc
import importlib

from tests.commands import COMMAND
from tests.tiny import MODELS

gc.disable()  # No garbage collection during the imports.
for name in (
    "braidrl.runtimes.streaming.processes",
    "braidrl.runtimes.streaming.worker_process",
    "braidrl.runtimes.spmd.launch",
    "braidrl.runtimes.spmd.rank_backend",
    # These modules are imported on demand, the last two by Ray, which itself must not be imported here.
    "braidrl.runtimes.restarts",
    "braidrl.flow.recipes.parts",
    "braidrl.rewards.verifier",
    "datasets",
    "pyarrow.compute",
    "peft",
    "torch.utils.tensorboard",
    "requests",
    "jsonschema",
    *(f"braidrl.flow.recipes.{name}" for name in ("grpo", "dapo", "ppo")),
    *(f"transformers.models.{name}.modeling_{name}" for name in MODELS),
    *COMMAND,
):
    importlib.import_module(name)
gc.freeze()
gc.enable()
