"""Tasks of the package `verifiers` of which each misbehaves in its own way; runs in that package's interpreter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

__all__ = ["HostileTasks"]
FLOOD = 50 << 20


class Remote(vf.Toolset[vf.ToolsetConfig]):
    """Tools of a server that runs already."""


class TaskData(vf.TaskData):
    tools: str | None = None
    """The address of the task's tools."""
    does: str = ""
    """What its reward does."""


class HostileTask(vf.Task[TaskData]):
    def toolsets(self, config: vf.TaskConfig) -> list[Any]:  # type: ignore[override]
        return [Remote(vf.ToolsetConfig(url=self.data.tools))] if self.data.tools else []

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.does == "setup":
            raise RuntimeError("x" * FLOOD)

    @vf.reward
    async def misbehaves(self, trace: vf.Trace) -> Any:
        if self.data.does == "sleeps":
            await asyncio.sleep(600)
        if self.data.does == "takes":
            return len(bytearray(10 << 30))
        if self.data.does == "grows":
            trace.info["grown"] = "x" * FLOOD
        return {"text": "x", "list": [1.0], "nan": float("nan"), "infinite": 1e999, "grows": 0.5}.get(
            self.data.does, 1.0
        )


class HostileConfig(vf.TasksetConfig):
    address: str = ""
    servers: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()


class HostileTasks(vf.Taskset[HostileTask, HostileConfig]):
    def load(self) -> Iterable[HostileTask]:
        for name in self.config.servers:
            yield HostileTask(TaskData(prompt="?", tools=f"{self.config.address}/{name}"), self.config.task)
        for name in self.config.rewards:
            yield HostileTask(TaskData(prompt="?", does=name), self.config.task)
