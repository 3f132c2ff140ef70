"""What the fork server of the tests imports at its start: whatever any test's ranks, workers and commands run, which are copies of it."""

from __future__ import annotations

import gc
import importlib

from tests.commands import COMMAND
from tests.tiny import MODELS

gc.disable()  # Nothing of what is imported is garbage.
for name in (
    "braidrl.runtimes.streaming.processes", "braidrl.runtimes.spmd.launch", "braidrl.runtimes.spmd.rank_backend",
    # What these import when they need it.
    "braidrl.runtimes.run", "braidrl.flow.recipes.parameters", "braidrl.rewards.verifier", "datasets", "pyarrow.compute",
    "peft", "torch.utils.tensorboard", *(f"braidrl.flow.recipes.{name}" for name in ("grpo", "dapo", "ppo")),
    *(f"transformers.models.{name}.modeling_{name}" for name in MODELS), *COMMAND,
):  # fmt: skip
    importlib.import_module(name)
gc.freeze()
gc.enable()
