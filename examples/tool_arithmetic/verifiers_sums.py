"""Sums without tools, as a taskset of the package `verifiers`: `rollout.environment.name=verifiers:FILE`."""

from __future__ import annotations

import random
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class SumsConfig(vf.TasksetConfig):
    count: int = 64
    seed: int = 0


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterable[SumTask]:
        source = random.Random(self.config.seed)
        for _ in range(self.config.count):
            a, b = source.randrange(10), source.randrange(10)
            yield SumTask(SumData(prompt=f"what is {a} plus {b}", answer=str(a + b)), self.config.task)
