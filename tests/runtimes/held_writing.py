"""A stage whose file makes every process that loads it write checkpoints by rules.

A file RUN.step-N.held beside the run's folder delays that checkpoint; RUN.full simulates a full disk.
"""

import time
from pathlib import Path

import braidrl.training.roles.checkpoint as checkpoint
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import shapes

write = getattr(checkpoint, "plainly", checkpoint.write_files)


def by_rules(parts, ranks, folder: Path, stem: str, is_first: bool):
    step, run = folder.parent.name.strip(".").removesuffix(".partial"), folder.parents[2]
    if run.with_name(f"{run.name}.full").exists():
        raise OSError(28, "No space left on device")
    while run.with_name(f"{run.name}.{step}.held").exists():
        time.sleep(0.01)
    return write(parts, ranks, folder, stem, is_first)


def heed() -> None:
    checkpoint.plainly, checkpoint.write_files = write, by_rules


heed()


@shapes.register(writes=["reward"])
def as_it_is(reward, rollout_log_probs: Ragged):
    """Read payload, so that the hybrid runtime's workers, which load no file themselves, get the rules too."""
    heed()
    return reward
