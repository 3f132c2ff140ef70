"""Agents as black boxes: a function with its own loop and any client library calls the endpoint; its session is the row.

async def agent(base_url, example) -> float: ...            `environment: agent:module:function`
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from braidrl.agents.endpoint import Endpoint
from braidrl.agents.player import Episode, Limits, Player, call_user, example_of, fail
from braidrl.agents.turns import EnvironmentFailed, Observation, outcome_of
from braidrl.data.rows import FinishReason, Uid


@dataclass
class Agents(Player):
    """A player that runs one agent per row against an open endpoint. Here `limits.timeout_s` limits the whole trajectory."""

    endpoint: Endpoint
    agent: Callable[..., Any]
    limits: Limits
    seed: int = 0
    on_finished: Callable[[Episode], None] = field(default=lambda episode: None)

    async def one(self, uid: Uid, prompt: list[int], metadata: dict[str, Any]) -> Episode:
        """Run a row's agent; the number or Observation that it returns is the score."""
        url = self.endpoint.open(uid)
        failure: EnvironmentFailed | None = None
        outcome = Observation()
        example = {**example_of(uid, metadata, self.seed, self.endpoint.purpose), "api_key": self.endpoint.key or "-"}
        try:
            found = outcome_of(await call_user(self.agent, url, example, timeout_s=self.limits.timeout_s))
            self.limits.check(found.reward)
            outcome = found
        except EnvironmentFailed as failed:
            failure = failed
        session = await self.endpoint.close(uid)
        reason = session.finish_reason or FinishReason.STOP
        episode = Episode(session.trajectory, session.turns, outcome.reward, outcome.correct, reason)
        if failure is not None:
            fail(episode, failure)
        if not session.trajectory.sequence_lengths:
            session.trajectory.append(prompt, opens=True)
        return episode
