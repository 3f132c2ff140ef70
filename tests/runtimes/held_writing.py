"""A stage whose file, wherever it is loaded, has checkpoints written by rules.

A file RUN.step-N.held beside the run's folder holds that checkpoint up, RUN.full makes its disk a full one.
"""

import time
from pathlib import Path

import braidrl.training.roles.checkpoint as checkpoint
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import shapes

write = getattr(checkpoint, "plainly", checkpoint.write_tensors)


def by_rules(tensors, path: Path) -> None:
    step, run = path.parents[1].name.strip(".").removesuffix(".partial"), path.parents[3]
    if run.with_name(f"{run.name}.full").exists():
        raise OSError(28, "No space left on device")
    while run.with_name(f"{run.name}.{step}.held").exists():
        time.sleep(0.01)
    write(tensors, path)


def heed() -> None:
    checkpoint.plainly, checkpoint.write_tensors = write, by_rules


heed()


@shapes.register(writes=["reward"])
def as_it_is(reward, rollout_log_probs: Ragged):
    """Reads payload: workers of the hybrid runtime, which load no file, then have the rules too."""
    heed()
    return reward
