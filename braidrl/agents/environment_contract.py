"""The contract of environments, as checks that run against the adapters and users' environments.

    subject = EnvironmentUnderTest("environment.py:Countdown", texts=("4", "2"), settings={"start": 5})
    for check in CHECKS:
        asyncio.run(check(subject))

A failed check raises AssertionError.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from braidrl.agents.environments import called, environments
from braidrl.agents.turns import Observation, check_context

ODD = ("", "\n", "\0", "∑ 😀 \u202e", "<tool_call>{", "9" * 10_000)
"""Unusual turns that models take."""


@dataclass(frozen=True)
class EnvironmentUnderTest:
    """An environment as named in a configuration, and a model's turns in it."""

    name: str
    texts: Sequence[str]
    """At least one turn; turns after the episode's end are not played."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=lambda: {"prompt": "", "answer": "", "seed": 7})
    """Fields of the data file, and the group's `seed`."""

    async def play(self, texts: Sequence[str]) -> list[Any]:
        """Return the first context, and the observation after each turn until the episode is done."""
        created = environments(self.name, self.settings)()
        environment = await created if inspect.isawaitable(created) else created
        observed: list[Any] = [await called(environment.reset, dict(self.example))]
        try:
            for text in texts:
                observed.append(await called(environment.step, text))
                if observed[-1].done:
                    break
        finally:
            if close := getattr(environment, "close", None):
                await called(close)
        return observed


async def what_it_says_can_be_said(subject: EnvironmentUnderTest) -> None:
    first, *observations = await subject.play(subject.texts)
    if first is not None:
        check_context(first.said if isinstance(first, Observation) else first)
    assert observations and all(isinstance(observation, Observation) for observation in observations)


async def the_same_example_and_turns_are_the_same_episode(subject: EnvironmentUnderTest) -> None:
    assert await subject.play(subject.texts) == await subject.play(subject.texts)


async def episodes_at_the_same_time_do_not_touch(subject: EnvironmentUnderTest) -> None:
    alone = await subject.play(subject.texts)
    assert all(episode == alone for episode in await asyncio.gather(*(subject.play(subject.texts) for _ in range(4))))


async def odd_turns_are_answered_too(subject: EnvironmentUnderTest) -> None:
    for text in ODD:
        _, observation = await subject.play([text])
        assert isinstance(observation, Observation)


CHECKS: tuple[Callable[[EnvironmentUnderTest], Awaitable[None]], ...] = (
    what_it_says_can_be_said,
    the_same_example_and_turns_are_the_same_episode,
    episodes_at_the_same_time_do_not_touch,
    odd_turns_are_answered_too,
)
