"""A taskset of the package `verifiers` with an environment of its own, which answers the model; runs in that package's
interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Game", "GameTasks"]


class GameTask(vf.Task[vf.TaskData]):
    """A word to say twice."""


class GameTasks(vf.Taskset[GameTask, vf.TasksetConfig]):
    def load(self) -> Iterable[GameTask]:
        yield GameTask(vf.TaskData(prompt="say ab"), self.config.task)


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Game(vf.Env[GameConfig]):
    """Asks again after the first turn; each right turn is worth half a point."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            said = [(await interaction.turn()).last_reply]
            said.append((await interaction.turn("again")).last_reply)
        interaction.trace.record_reward("right", sum(reply == "ab" for reply in said) / 2, 1.0)
