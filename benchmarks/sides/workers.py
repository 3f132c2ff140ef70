"""A role's worker without a run around it, for benchmarks of the training step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from braidrl.config import parse_config
from braidrl.training.backends import BackendSpec
from braidrl.training.roles.worker import RoleWorker

Worker = TypeVar("Worker", bound=RoleWorker)


def worker_of(kind: type[Worker], case: Mapping[str, Any], train: bool = True, **trainer: Any) -> Worker:
    """Return a worker of this kind with the case's model and threads; `trainer` are settings of that section."""
    torch.set_num_threads(case["threads"])
    tree = {"flow": "grpo", "model": case["model"], "device": "cpu", "dtype": case["dtype"], "trainer": trainer}
    return kind(BackendSpec("actor" if train else "reference", parse_config(tree), train))
