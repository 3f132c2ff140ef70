"""Players of trajectories, many at once: a model and an environment take turns until one of them ends the trajectory, or an agent, a
function with its own loop and any client library, calls the endpoint.

                ┌──────────────────── text, decoded ───────────────────┐
context ──▶ engine ──▶ sampled tokens ──append──▶ Trajectory        environment
                ▲                                     ▲                 |
                └──────────── its tokens ─────────────┴── observation, tokenised alone
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from braidrl.agents.environments import Environment, called
from braidrl.agents.trajectory import Trajectory, generated_columns
from braidrl.agents.turns import EnvironmentFailed, Observation, TurnTemplate, check_context, outcome_of
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.random import hashed
from braidrl.data.chat import TEMPLATE
from braidrl.data.rows import Column, FinishReason, Rows, Uid
from braidrl.engines.engine import Engine
from braidrl.engines.requests import Request, SamplingParams
from braidrl.errors import UserError
from braidrl.observe.stalls import WORK

if TYPE_CHECKING:
    # Only agents need aiohttp, which is optional.
    from braidrl.agents.endpoint import Endpoint


@dataclass(frozen=True)
class Limits:
    """Limits of a trajectory, and the number of concurrent trajectories."""

    at_once: int
    timeout_s: float
    """Seconds for one `reset` or `step`."""
    max_turns: int
    max_sequence_tokens: int
    correct_score: float = 1.0
    """A trajectory with at least this score is correct, unless its environment says otherwise."""
    max_abs: float = math.inf
    """A score with a larger absolute value is a failure of the environment."""

    def check(self, score: float) -> None:
        """Raise EnvironmentFailed for a score beyond the limit."""
        if not abs(score) <= self.max_abs:
            raise EnvironmentFailed("reward", f"the score is {score:g}, and reward.max_abs is {self.max_abs:g}")


@dataclass
class Episode:
    """A trajectory and its outcome."""

    trajectory: Trajectory
    turns: int = 0
    score: float = 0.0
    correct: bool | None = None
    finish_reason: FinishReason = FinishReason.STOP
    failure: str | None = None
    """`timeout`, or the name of the exception that the environment raised."""
    detail: str = ""
    killed: bool = False
    """True if the environment's process was ended from outside."""

    def fail(self, failed: EnvironmentFailed) -> None:
        """Record the failure that ended the trajectory."""
        self.finish_reason = FinishReason.ERROR
        self.failure, self.detail, self.killed = failed.reason, failed.detail, failed.killed


class Player(ABC):
    """The base of players, which play each row independently."""

    limits: Limits
    seed: int
    on_finished: Callable[[Episode], None]

    async def play(self, rows: Rows) -> list[Episode]:
        """Play one episode for each row, at most `at_once` at a time, and return them in the order of the rows."""
        prompts, metadata = rows["prompt"], rows["metadata"]

        free = asyncio.Semaphore(self.limits.at_once)

        async def one(number: int, uid: Uid) -> Episode:
            async with free:
                for _ in range(2):
                    episode = await self.one(uid, prompts[number].tolist(), metadata[number])
                    if not episode.killed:
                        break
                if not episode.trajectory.sequence_lengths:
                    episode.trajectory.append(prompts[number].tolist(), opens=True)
                self.on_finished(episode)
                return episode

        tasks = [asyncio.ensure_future(one(number, uid)) for number, uid in enumerate(rows.uids())]
        # The first exception cancels the other episodes.
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @abstractmethod
    async def one(self, uid: Uid, prompt: list[int], metadata: dict[str, Any]) -> Episode:
        """Play a row's trajectory to its end; failures in it are recorded, not raised. It may be empty: the row then has its prompt."""

    def example_of(self, uid: Uid, metadata: dict[str, Any], purpose: str) -> dict[str, Any]:
        """Return the row's example for `Environment.reset` or an agent; `seed` is the same for all rows of a group."""
        source, group, sample = uid
        own = int(hashed(self.seed, "environment", purpose, source, group)) & 0x7FFFFFFF
        return {**metadata, "source": source, "group": group, "sample": sample, "seed": own}

    async def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a user's function. Raises EnvironmentFailed for any exception and after the time limit."""
        try:
            with WORK.waiting():
                async with asyncio.timeout(self.limits.timeout_s) as limit:
                    return await called(function, *arguments)
        except EnvironmentFailed:
            raise
        except Exception as error:
            if limit.expired():
                name = getattr(function, "__name__", "the call")
                raise EnvironmentFailed("timeout", f"{name} took over {self.limits.timeout_s:g} s") from None
            raise EnvironmentFailed(type(error).__name__, str(error)) from error


@dataclass
class Agents(Player):
    """A player that runs one agent per row against an open endpoint. Here `limits.timeout_s` limits the whole trajectory.

    async def agent(base_url, example) -> float: ...            `environment: agent:module:function`
    """

    endpoint: "Endpoint"
    agent: Callable[..., Any]
    limits: Limits
    seed: int = 0
    on_finished: Callable[[Episode], None] = field(default=lambda episode: None)

    async def one(self, uid: Uid, prompt: list[int], metadata: dict[str, Any]) -> Episode:
        """Run a row's agent; the number or Observation that it returns is the score."""
        url = self.endpoint.open(uid)
        example = {**self.example_of(uid, metadata, self.endpoint.purpose), "api_key": self.endpoint.key or "-"}
        outcome: Observation | EnvironmentFailed
        try:
            outcome = outcome_of(await self.ask(self.agent, url, example))
            self.limits.check(outcome.reward)
        except EnvironmentFailed as failed:
            outcome = failed
        session = await self.endpoint.close(uid)
        episode = Episode(session.trajectory, session.turns, finish_reason=session.finish_reason)
        if isinstance(outcome, EnvironmentFailed):
            episode.fail(outcome)
        else:
            episode.score, episode.correct = outcome.reward, outcome.correct
        return episode


@dataclass
class Episodes(Player):
    """A player with one engine, one kind of environment and one set of sampling settings."""

    engine: Engine
    make: Callable[[], Environment | Awaitable[Environment]]
    template: TurnTemplate
    sampling: SamplingParams
    limits: Limits
    seed: int = 0
    purpose: str = "train"
    stage: str = "generate"
    on_finished: Callable[[Episode], None] = field(default=lambda episode: None)

    async def one(self, uid: Uid, prompt: list[int], metadata: dict[str, Any]) -> Episode:
        episode = Episode(Trajectory(uid))
        environment: Environment | None = None
        try:
            environment = await self.ask(self.make)
            await self._play(episode, environment, prompt, self.example_of(uid, metadata, self.purpose))
        except EnvironmentFailed as failed:
            episode.fail(failed)
        if environment is not None and hasattr(environment, "close"):
            try:
                await self.ask(environment.close)
            except EnvironmentFailed as failed:
                episode.fail(failed)
        return episode

    async def _play(
        self, episode: Episode, environment: Environment, prompt: list[int], example: dict[str, Any]
    ) -> None:
        trajectory, tools = episode.trajectory, getattr(environment, "tools", ())
        own = self.template.template.with_arguments(example.get(TEMPLATE) or {})
        template = replace(self.template, template=own)
        context = await self.ask(environment.reset, example)
        if context is None and not tools:
            trajectory.append(prompt, opens=True)
        else:
            context = example["prompt"] if context is None else context
            try:
                check_context(context)
            except TypeError as error:
                raise EnvironmentFailed("TypeError", str(error)) from error
            trajectory.append(tokenised(template.first, context, tools), opens=True)
        while True:
            ids = torch.tensor(trajectory.sequence, dtype=torch.int64)
            room = self.limits.max_sequence_tokens - len(ids)
            if room < 1:
                raise UserError(
                    f"row {trajectory.uid}: a first context of {len(ids)} tokens leaves no room for a response "
                    f"in a sequence of {self.limits.max_sequence_tokens}; raise rollout.max_sequence_tokens"
                )
            sampling = replace(self.sampling, max_tokens=min(self.sampling.max_tokens, room))
            request = Request(
                trajectory.uid, ids, sampling, self.purpose, self.stage, first_draw=trajectory.action_tokens
            )
            finished = await self.engine.submit(request)
            trajectory.append(finished.tokens.tolist(), log_probs=finished.log_probs, versions=finished.versions)
            episode.turns, episode.finish_reason = episode.turns + 1, finished.finish_reason
            if finished.finish_reason is FinishReason.ABORT:
                return
            observation = await self.ask(environment.step, template.text(finished.tokens.tolist(), tools))
            if not isinstance(observation, Observation):
                raise EnvironmentFailed("TypeError", f"`step` returned {observation!r}, which is no Observation")
            self.limits.check(episode.score + observation.reward)
            episode.score += observation.reward
            episode.correct = observation.correct if observation.correct is not None else episode.correct
            if observation.done:
                return
            if episode.turns >= self.limits.max_turns or not self._continue(trajectory, observation, template, tools):
                episode.finish_reason = FinishReason.LENGTH
                return

    def _continue(self, trajectory: Trajectory, observation: Observation, template: TurnTemplate, tools: Any) -> bool:
        """Append the observation. Return False, and append nothing, if it leaves no room for another action."""
        held, opens = trajectory.sequence, False
        if observation.restart:
            ids = tokenised(template.first, observation.said, tools)
            opens = ids[: len(held)] != held
            ids = ids if opens else ids[len(held) :]
        else:
            ids = tokenised(template.following, observation.said, held[-1], tools)
        if (0 if opens else len(held)) + len(ids) >= self.limits.max_sequence_tokens:
            return False
        trajectory.append(ids, opens=opens)
        return True


def tokenised(template: Callable[..., list[int]], *said: Any) -> list[int]:
    """Tokenise an environment's text or messages. Raises EnvironmentFailed if the chat template refuses them."""
    try:
        return template(*said)
    # A chat template may raise any exception for an environment's message.
    except Exception as error:
        raise EnvironmentFailed("template", f"{type(error).__name__}: {error}"[:600]) from error


def episode_columns(episodes: Sequence[Episode], limits: Limits) -> dict[str, Column]:
    """Return the columns of a generate stage with an environment, in the order of `episodes`.

    `prompt` holds the tokens before the first action of the first sequence, and the whole sequence if it has no action.
    """
    trajectories, prompts = [episode.trajectory for episode in episodes], []
    for trajectory in trajectories:
        end = trajectory.sequence_lengths[0]
        acted = trajectory.actions[:end]
        prompts.append(trajectory.tokens[: acted.index(True) if True in acted else end])
    dtype = next((turn.dtype for t in trajectories for turn in t.log_probs), torch.float32)
    generated = generated_columns(
        Ragged.from_rows([t.tokens for t in trajectories], torch.int64),
        Ragged.from_rows([t.actions for t in trajectories], torch.bool),
        Ragged.from_rows([t.sequence_lengths for t in trajectories], torch.int64),
        Ragged.from_rows([torch.cat([*t.log_probs, torch.empty(0, dtype=dtype)]) for t in trajectories], dtype),
        [torch.cat([*t.versions, torch.empty(0, dtype=torch.int64)]) for t in trajectories],
        [episode.finish_reason for episode in episodes],
    )
    score = torch.tensor([e.score for e in episodes], dtype=torch.float32)
    correct = [e.score >= limits.correct_score if e.correct is None else e.correct for e in episodes]
    return {
        "prompt": Ragged.from_rows(prompts, torch.int64),
        "prompt_length": torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64),
        **generated,
        "score": score,
        "correct": torch.tensor(correct, dtype=torch.float32),
        "reward": score.clone(),
    }
