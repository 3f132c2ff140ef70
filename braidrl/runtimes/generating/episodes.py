"""Runs a generate stage that names an environment: rows in, episodes played on the role's engine, columns out."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from braidrl.config import Config
from braidrl.data.rows import Column, Rows
from braidrl.data.templates import PromptTemplate
from braidrl.flow import Stage
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Bar
from braidrl.rollout.engine import Engine, RoleEngine
from braidrl.rollout.episodes.environments import AGENT, agent_of, environments
from braidrl.rollout.episodes.player import Episode, Episodes, Limits, episode_columns, failure_counts
from braidrl.rollout.episodes.turns import TurnTemplate
from braidrl.rollout.requests import SamplingParams

SHOW_EVERY_S = 1.0
"""How often the progress of episodes is told of, also while none of them ends."""


def play(
    engine: RoleEngine,
    stage: Stage,
    rows: Rows,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams,
    sums: Sums,
    bar: Bar,
) -> tuple[Mapping[str, Column], list[str]]:
    """Return the stage's columns, and a line for each kind of failure; counts and turns go to `sums`."""

    def finished(episode: Episode) -> None:
        bar.update(1, episode.trajectory.action_tokens, engine.in_flight)

    limits = limits_of(config, engine.max_sequence_tokens)
    environment, settings = stage.params["environment"], config.rollout.environment.params
    template = TurnTemplate(PromptTemplate(tokenizer, config.data.chat_template, config.data.system_prompt))
    purpose = str(stage.params.get("purpose", "train"))

    async def played_by_agents(running: Engine) -> list[Episode]:
        # Imported here: only agents need aiohttp, which need not be installed.
        from braidrl.rollout.episodes.agents import Agents
        from braidrl.rollout.episodes.endpoint import Endpoint

        agent = partial(agent_of(environment), **settings)
        async with Endpoint(running, template, sampling, limits.max_sequence_tokens, purpose, stage.name) as endpoint:
            return await Agents(endpoint, agent, limits, config.seed, finished).play(rows)

    async def played_in_turns(running: Engine) -> list[Episode]:
        make = environments(environment, settings)
        episodes = Episodes(running, make, template, sampling, limits, config.seed, purpose, stage.name, finished)
        return await episodes.play(rows)

    async def played_and_shown(running: Engine) -> list[Episode]:
        showing = asyncio.ensure_future(show(bar, engine))
        try:
            return await (played_by_agents if environment.startswith(AGENT) else played_in_turns)(running)
        finally:
            showing.cancel()

    played = engine.run(played_and_shown)
    sums.add("environment/turns", sum(episode.turns for episode in played), len(played))
    counts = failure_counts(played)
    for reason, count in counts.items():
        sums.add(f"environment/failures/{reason}", count)
    return episode_columns(played, limits), [failure_line(reason, count, played) for reason, count in counts.items()]


async def show(bar: Bar, engine: RoleEngine) -> None:
    """Tells of the rows in flight until it is cancelled."""
    while True:
        await asyncio.sleep(SHOW_EVERY_S)
        bar.update(in_flight=engine.in_flight)


def limits_of(config: Config, max_sequence_tokens: int) -> Limits:
    """Return what ends a trajectory; a right answer is worth 1 unless the configuration says otherwise."""
    environment, right = config.rollout.environment, config.reward.correct_score
    return Limits(
        environment.at_once, environment.timeout_s, environment.max_turns, max_sequence_tokens,
        1.0 if right is None else right, config.reward.max_abs,
    )  # fmt: skip


def failure_line(reason: str, count: int, played: Sequence[Episode]) -> str:
    """Return how many trajectories failed in this way, and the first of them."""
    first = next(episode for episode in played if episode.failure == reason)
    return f"{count} of {len(played)} trajectories ended by {reason}; row {first.trajectory.uid}: {first.detail}"
