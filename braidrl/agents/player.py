"""Players of concurrent trajectories: a model and an environment take turns until one of them ends the trajectory,
or an agent, a function with its own loop and any client library, calls the endpoint.

                ┌──────────────────── text, decoded ───────────────────┐
context ──▶ engine ──▶ sampled tokens ──append──▶ Trajectory        environment
                ▲                                     ▲                 |
                └──────────── its tokens ─────────────┴── observation, tokenized alone

With several policies an episode has a trajectory for each. An observation names the policy that reads it and acts next:

actor  context ──▶ turn ┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈ observation ──▶ turn
                    └─▶ environment ─┐      ▲
rival                       context ──▶ turn ┘
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from braidrl.agents.environments import Environment, called
from braidrl.agents.spans import EpisodeSpans
from braidrl.agents.trajectory import Limits, Trajectory, TurnSampling
from braidrl.agents.turns import EnvironmentFailed, Observation, SeenIds, TurnTemplate, check_context, outcome_of
from braidrl.algorithms.random import hashed
from braidrl.cluster.event_loop import all_or_none
from braidrl.data.chat import TEMPLATE
from braidrl.data.rows import FinishReason, Rows, Uid
from braidrl.data.vision import moved
from braidrl.engines.engine import Engine
from braidrl.observe.stalls import WORK
from braidrl.sandbox.host import failure_of

if TYPE_CHECKING:
    # Only agents need aiohttp, which is optional.
    from braidrl.agents.endpoint import Endpoint

ENDING_S = 1.0
"""Seconds in which the environment of a cancelled row may close; its process then ends."""


@dataclass(kw_only=True)
class Player(ABC):
    """The base of players, which play each row independently."""

    limits: Limits
    seed: int = 0
    on_finished: Callable[[Trajectory], None] = lambda trajectory: None
    policies: tuple[str, ...] = ()
    """The other roles that take turns in each episode."""
    spans: EpisodeSpans = field(default_factory=EpisodeSpans)

    async def play(self, rows: Rows) -> list[Trajectory]:
        """Play one trajectory for each row, at most `at_once` concurrently, and return them in the rows' order."""
        free, metadata = asyncio.Semaphore(self.limits.at_once), rows["metadata"]

        images = rows.get("images") or [()] * len(rows)

        async def play_row(uid: Uid, prompt: SeenIds, metadata: dict[str, Any]) -> Trajectory:
            async with free:
                # An external kill of the process is not the environment's fault.
                for attempt in range(1 + max(1, self.limits.retries)):
                    other_policies = {role: Trajectory(uid) for role in self.policies}
                    trajectory = Trajectory(uid, attempt=attempt, other_policies=other_policies)
                    named = dict(zip(("source", "group", "sample"), uid, strict=True))
                    with self.spans.span("episode", attempt=attempt, **named) as about:
                        try:
                            await self.play_one(trajectory, prompt, metadata)
                        except EnvironmentFailed as failed:
                            trajectory.fail(failed)
                        about |= {"score": trajectory.score, "turns": sum(t.turns for t in trajectory.every)}
                        about |= {"error.type": trajectory.failure, "finish_reason": trajectory.finish_reason.name}
                    if not trajectory.killed and (not trajectory.failure or attempt >= self.limits.retries):
                        break
                for of_policy in trajectory.every:
                    if not of_policy.sequence_lengths:
                        of_policy.append(prompt.ids, opens=True, images=prompt.images)
                        of_policy.idle = bool(self.policies)
                self.on_finished(trajectory)
                return trajectory

        async with all_or_none() as group:
            prompts = zip(rows["prompt"].tolist(), images, strict=True)
            contexts = [SeenIds(ids, moved(spans, 0)) for ids, spans in prompts]
            row_arguments = zip(rows.uids(), contexts, metadata.values, strict=True)
            tasks = [group.create_task(play_row(*row)) for row in row_arguments]
        return [task.result() for task in tasks]

    @abstractmethod
    async def play_one(self, trajectory: Trajectory, prompt: SeenIds, metadata: dict[str, Any]) -> None:
        """Play a row's trajectory to its end. Raises EnvironmentFailed; if it is then empty, the row has its prompt."""

    def example_of(self, uid: Uid, metadata: dict[str, Any], purpose: str) -> dict[str, Any]:
        """Return the row's example for `Environment.reset` or an agent; `seed` is the same for all rows of a group."""
        source, group, sample = uid
        seed = int(hashed(self.seed, "environment", purpose, source, group)) & 0x7FFFFFFF
        return {**metadata, "source": source, "group": group, "sample": sample, "seed": seed}

    async def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a user's function. Raises EnvironmentFailed if it raises or exceeds the time limit."""
        name = getattr(function, "__name__", "make")
        try:
            with WORK.waiting(), self.spans.span(name):
                async with asyncio.timeout(self.limits.timeout_s) as limit:
                    return await called(function, *arguments)
        except EnvironmentFailed:
            raise
        except Exception as error:
            if limit.expired():
                raise EnvironmentFailed("timeout", f"{name} took over {self.limits.timeout_s:g} s") from None
            failure = failure_of(error)
            raise EnvironmentFailed(failure["failure"], failure["detail"]) from error


@dataclass
class AgentPlayer(Player):
    """A player that runs an `async def agent(base_url, example) -> float` per row; with `limits.timeout_s` for all."""

    endpoint: "Endpoint"
    agent: Callable[..., Any]

    async def play_one(self, trajectory: Trajectory, prompt: SeenIds, metadata: dict[str, Any]) -> None:
        """Run a row's agent; the number or Observation that it returns is the score.

        An agent that made no call has failed.
        """
        uid, endpoint = trajectory.uid, self.endpoint
        example = {**self.example_of(uid, metadata, endpoint.turns.purpose), "api_key": endpoint.key or "-"}
        try:
            outcome = outcome_of(await self.ask(self.agent, endpoint.open(trajectory), example))
        finally:
            await endpoint.close(uid)
        if not trajectory.sequence_lengths:
            raise EnvironmentFailed("no call", "the agent returned without a call of its endpoint, base_url")
        trajectory.add_reward(outcome.reward, outcome.correct, self.limits.max_abs)


@dataclass
class EnvironmentPlayer(Player):
    """A player with one engine, one kind of environment and one set of sampling settings."""

    engine: Engine
    make: Callable[[], Environment | Awaitable[Environment]]
    template: TurnTemplate
    turns: TurnSampling
    _: KW_ONLY
    role: str = "actor"
    """The role whose trajectory is the row's main one."""

    def trajectory_of(self, trajectory: Trajectory, role: str) -> Trajectory:
        """Return a policy's trajectory in an episode. Raises EnvironmentFailed for a role that does not play."""
        acting = trajectory if role == self.role else trajectory.other_policies.get(role)
        if acting is None:
            playing = ", ".join([self.role, *trajectory.other_policies])
            raise EnvironmentFailed(
                "policy",
                f"the environment names {role!r}, and {playing} play; name it in `policies` of {self.turns.stage}",
            )
        return acting

    async def play_one(self, trajectory: Trajectory, prompt: SeenIds, metadata: dict[str, Any]) -> None:
        environment, limit = await self.ask(self.make), None
        try:
            example = self.example_of(trajectory.uid, metadata, self.turns.purpose)
            await self._take_turns(trajectory, environment, prompt, example)
        except EnvironmentFailed as failed:
            trajectory.fail(failed)
        except asyncio.CancelledError:  # the engine's loop waits for the end of a cancelled row
            limit = ENDING_S
            raise
        finally:
            if hasattr(environment, "close"):
                try:
                    async with asyncio.timeout(limit):
                        await self.ask(environment.close)
                except EnvironmentFailed as failed:
                    trajectory.fail(failed)
                except TimeoutError:
                    pass

    async def _take_turns(
        self, trajectory: Trajectory, environment: Environment, prompt: SeenIds, example: dict[str, Any]
    ) -> None:
        limits, turns, loop = self.limits, self.turns, asyncio.get_running_loop()
        tools = getattr(environment, "tools", ())
        end = loop.time() + limits.episode_timeout_s
        prompts = self.template.template.with_arguments(example.get(TEMPLATE) or {})
        template = replace(self.template, template=prompts)
        context = await self.ask(environment.reset, example)
        policy = self.role
        if isinstance(context, Observation):
            if context.done or context.reward or context.rewards:
                raise EnvironmentFailed("reset", "it gives a reward or ends the episode before the first turn")
            policy, context = context.policy or policy, context.said or None
        acting = self.trajectory_of(trajectory, policy)
        if context is None and not tools:
            new, opens = prompt, True
        else:
            context = example["prompt"] if context is None else context
            try:
                check_context(context)
            except TypeError as error:
                raise EnvironmentFailed("TypeError", str(error)) from error
            new, opens = tokenised(template.first, context, tools), True
        while True:
            with self.spans.span("chat", policy=policy, turn=acting.turns) as about:
                sampled = await acting.sample_turn(
                    self.engine,
                    new.ids,
                    # Each policy draws with separate random numbers.
                    turns if policy == self.role else replace(turns, stage=f"{turns.stage} {policy}"),
                    opens=opens,
                    images=new.images,
                    policy=policy,
                )
                about |= {"gen_ai.usage.input_tokens": len(new.ids), "gen_ai.usage.output_tokens": len(sampled)}
            if acting.finish_reason is FinishReason.ABORT:
                trajectory.end(FinishReason.ABORT)
                return
            if loop.time() > end:
                raise EnvironmentFailed("timeout", f"the episode took over {limits.episode_timeout_s:g} s")
            observation = await self.ask(environment.step, template.text(sampled, tools))
            if not isinstance(observation, Observation):
                raise EnvironmentFailed("TypeError", f"`step` returned {observation!r}, which is no Observation")
            acting.add_reward(observation.reward, observation.correct, limits.max_abs)
            for role, reward in observation.rewards.items():
                self.trajectory_of(trajectory, role).add_reward(reward, None, limits.max_abs)
            if observation.done:
                return
            policy = observation.policy or policy
            acting = self.trajectory_of(trajectory, policy)
            if sum(t.turns for t in trajectory.every) >= limits.max_turns:
                # An observation without a turn after it is not appended.
                trajectory.end(FinishReason.LENGTH)
                return
            if not acting.sequence_lengths:
                new = tokenised(template.first, observation.said or example["prompt"], tools)
                earlier_ids, opens = [], True
            elif observation.restart:
                earlier_ids, images_before = acting.sequence, acting.sequence_images
                new = tokenised(template.first, observation.said, tools)
                opens = (
                    new.ids[: len(earlier_ids)] != earlier_ids or [*new.images[: len(images_before)]] != images_before
                )
                rest = moved(new.images[len(images_before) :], -len(earlier_ids))
                new = new if opens else SeenIds(new.ids[len(earlier_ids) :], rest)
            else:
                earlier_ids, opens = acting.sequence, False
                new = tokenised(template.following, observation.said, earlier_ids[-1], tools)
            if turns.max_sequence_tokens - len(new.ids) - (0 if opens else len(earlier_ids)) < 1:
                trajectory.end(FinishReason.LENGTH)
                return


def tokenised(template: Callable[..., SeenIds], *arguments: Any) -> SeenIds:
    """Tokenize an environment's text or messages. Raises EnvironmentFailed if the chat template refuses them."""
    try:
        return template(*arguments)
    # A chat template may raise any exception for an environment's message.
    except Exception as error:
        raise EnvironmentFailed("template", f"{type(error).__name__}: {error}"[:600]) from error
