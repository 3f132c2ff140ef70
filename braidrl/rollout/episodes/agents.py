"""Agents as black boxes: a function with its own loop and any client library talks to the endpoint; its session is the row.

async def agent(base_url, example) -> float: ...            `environment: agent:module:function`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from braidrl.data.rows import FinishReason
from braidrl.rollout.episodes.endpoint import Endpoint
from braidrl.rollout.episodes.observations import Observation
from braidrl.rollout.episodes.player import EnvironmentFailed, Episode, Limits, Player, answer_of, example_of, fail
from braidrl.rollout.requests import Uid


@dataclass
class Agents(Player):
    """Runs one agent per row against an open endpoint. `timeout_s` is the limit of a whole trajectory here."""

    endpoint: Endpoint
    agent: Callable[..., Any]
    limits: Limits
    seed: int = 0
    on_finished: Callable[[Episode], None] = field(default=lambda episode: None)

    async def one(self, uid: Uid, prompt: list[int], metadata: dict[str, Any]) -> Episode:
        """Runs a row's agent; what it returns, a number or an Observation, is the score."""
        url = self.endpoint.open(uid)
        failure: EnvironmentFailed | None = None
        outcome = Observation()
        example = example_of(uid, metadata, self.seed, self.endpoint.purpose)
        try:
            outcome = outcome_of(await answer_of(self.agent, url, example, timeout_s=self.limits.timeout_s))
        except EnvironmentFailed as failed:
            failure = failed
        session = await self.endpoint.close(uid)
        episode = Episode(
            session.trajectory,
            session.turns,
            outcome.reward,
            outcome.correct,
            session.finish_reason or FinishReason.STOP,
        )
        if failure is not None:
            fail(episode, failure)
        if not session.trajectory.sequence_lengths:
            session.trajectory.append(prompt, opens=True)
        return episode


def outcome_of(returned: Any) -> Observation:
    """The score that an agent gave itself. Raises EnvironmentFailed for what is none."""
    if isinstance(returned, Observation):
        return returned
    try:
        return Observation(reward=float(returned))
    except (TypeError, ValueError):
        raise EnvironmentFailed("TypeError", f"the agent returned {returned!r}, which is no score") from None
