"""A role's worker alone, without a run around it, as the benchmarks of the training step use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from braidrl.config import parse_config
from braidrl.training.roles.make import DecoderWorker

Worker = TypeVar("Worker", bound=DecoderWorker)


def worker_of(kind: type[Worker], case: Mapping[str, Any], train: bool = True, **trainer: Any) -> Worker:
    """The case's model in a worker of that kind, on the case's threads; `trainer` are settings of that section."""
    torch.set_num_threads(case["threads"])
    tree = {"flow": "grpo", "model": case["model"], "device": "cpu", "dtype": case["dtype"], "trainer": trainer}
    return kind("actor" if train else "reference", parse_config(tree), train=train)
