"""Many trajectories at once: slow environments do not delay others, and a failing environment ends only its own
trajectory.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from braidrl.agents.environments import answerer, environments
from braidrl.agents.player import EnvironmentPlayer
from braidrl.agents.trajectory import Limits, Trajectory, TurnSampling, trajectory_columns
from braidrl.agents.turns import Observation
from braidrl.data.rows import FinishReason
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import SamplingParams
from braidrl.engines.routing.router import Router
from braidrl.engines.stepping import EngineReplica
from braidrl.errors import UserError
from braidrl.flow.signatures import PLAYED
from tests.agents.chat import Script, make_chat_tokenizer, make_rows, turn_template
from tests.engines.tiny import make_model, make_tokenizer
from tests.engines.virtual_time import run_virtually

HERE = __file__
LIMITS = Limits(at_once=64, timeout_s=30, max_turns=8, max_sequence_tokens=300)


class Turns:
    """An environment of several turns of `seconds` each; it records when it was busy."""

    def __init__(self, turns: int = 4, seconds: float = 0.0, log: list[tuple[float, float]] | None = None) -> None:
        self.left, self.seconds, self.log = turns, seconds, [] if log is None else log

    async def reset(self, example: dict[str, Any]) -> None:
        self.example = example

    async def step(self, text: str) -> Observation:
        start = asyncio.get_running_loop().time()
        await asyncio.sleep(self.seconds)
        self.log.append((start, asyncio.get_running_loop().time()))
        self.left -= 1
        return Observation("more", reward=0.25, done=self.left == 0)


class Faulty:
    """Fails in the second turn, in the way that the row's prompt names."""

    def __init__(self) -> None:
        self.turn = 0
        self.closed = False

    async def reset(self, example: dict[str, Any]) -> Any:
        self.how = example["prompt"]
        if self.how == "reset":
            raise OSError("no sandbox")
        return 7 if self.how == "context" else None

    async def step(self, text: str) -> Any:
        self.turn += 1
        if self.turn == 2:
            if self.how == "raise":
                raise ExceptionGroup("errors in a task group", [KeyError("board")])
            if self.how == "hang":
                await asyncio.sleep(1000)
            if self.how == "type":
                return "not an observation"
        return Observation("on", reward=0.5, done=self.turn == 3)

    async def close(self) -> None:
        if self.how == "close":
            raise RuntimeError("cannot stop")


def is_long(texts: list[str], example: dict[str, Any], length: int = 3) -> Observation:
    """Check whether a response is long; an environment in the form of a plain function."""
    return Observation("longer", reward=float(len(texts[-1])), done=len(texts) == length)


RELEASED = threading.Event()
LATE: list[bool] = []
"""For each hanging call, True if it was released before its own timeout."""


def play_slowly(texts: list[str], example: dict[str, Any]) -> Observation:
    if example["sample"] == 0:
        LATE.append(RELEASED.wait(60))
    return Observation(done=True)


def script_play(
    make: Any, rows: Any, limits: Limits = LIMITS, seconds: float = 0.0, **settings: Any
) -> tuple[list[Trajectory], float]:
    """Play episodes in virtual time; return them and their duration."""
    tokenizer = make_chat_tokenizer(None)

    async def made() -> Any:
        return make()

    async def run() -> tuple[list[Trajectory], float]:
        engine = Script(tokenizer, ["ab"], seconds)
        template = turn_template(tokenizer)
        episodes = EnvironmentPlayer(
            engine,
            made,
            template,
            TurnSampling(SamplingParams(), limits.max_sequence_tokens),
            limits=limits,
            **settings,
        )  # type: ignore[arg-type]
        return await episodes.play(rows), asyncio.get_running_loop().time()

    return run_virtually(run())


def rows_of(prompts: list[str], samples: int = 1) -> Any:
    return make_rows(make_chat_tokenizer(None), prompts, samples)


def test_four_environments_shared_by_64_trajectories_idle_below_5_percent() -> None:
    log: list[tuple[float, float]] = []
    limits = Limits(at_once=4, timeout_s=30, max_turns=8, max_sequence_tokens=300)
    played, seconds = script_play(lambda: Turns(4, 1.0, log), rows_of(["?"] * 64), limits, seconds=0.02)
    assert len(played) == 64 and all(episode.turns == 4 for episode in played)
    busy = sum(end - start for start, end in log)
    assert busy == pytest.approx(64 * 4 * 1.0)
    print(f"idle: {1 - busy / (4 * seconds):.2%}")
    assert busy / (4 * seconds) > 0.95
    assert max(sum(start <= t < end for start, end in log) for t, _ in log) <= 4


def test_slow_environments_do_not_hold_up_the_trajectories_beside_them() -> None:
    log: list[tuple[float, float]] = []
    numbers = iter(range(64))

    def make() -> Turns:
        return Turns(4, 100.0) if next(numbers) < 4 else Turns(4, 0.1, log)

    limits = Limits(at_once=64, timeout_s=1000, max_turns=8, max_sequence_tokens=300)
    _, seconds = script_play(make, rows_of(["?"] * 64), limits, seconds=1.0)
    assert max(end for _, end in log) == pytest.approx(4 * 1.1), "fast environments are not delayed"
    assert seconds == pytest.approx(4 * 101.0)


def test_a_failing_environment_ends_its_own_trajectory_with_a_counted_reason() -> None:
    prompts = ["fine", "raise", "reset", "hang", "type", "close", "context"]
    rows = rows_of(prompts)
    played, _ = script_play(Faulty, rows)
    by_prompt = dict(zip(prompts, played, strict=True))
    assert {prompt: (e.failure, e.turns) for prompt, e in by_prompt.items()} == {
        "fine": (None, 3),
        "raise": ("KeyError", 2),
        "reset": ("OSError", 0),
        "hang": ("timeout", 2),
        "type": ("TypeError", 2),
        "close": ("RuntimeError", 3),
        "context": ("TypeError", 0),
    }
    failures = Counter(one.failure for one in played if one.failure)
    assert failures == {"KeyError": 1, "OSError": 1, "timeout": 1, "TypeError": 2, "RuntimeError": 1}
    assert by_prompt["hang"].detail == "step took over 30 s"
    columns = trajectory_columns(played, LIMITS)
    assert set(columns) == set(PLAYED)
    ended = columns["finish_reason"].tolist()  # type: ignore[union-attr]
    assert ended == [FinishReason.STOP] + [FinishReason.ERROR] * 6
    assert columns["statistics_mask"].tolist() == [1] + [0] * 6  # type: ignore[union-attr]
    assert columns["score"].tolist() == [1.5, 0.5, 0.0, 0.5, 0.5, 1.5, 0.0]  # type: ignore[union-attr]
    assert columns["correct"].tolist() == [1, 0, 0, 0, 0, 1, 0]  # type: ignore[union-attr]
    assert columns["action_tokens"].tolist() == [e.action_tokens for e in played]  # type: ignore[union-attr]
    assert columns["prompt"].tolist() == rows["prompt"].tolist()  # type: ignore[union-attr]


class Flaky(Turns):
    """Fails in its second turn, until it was made so often."""

    made = 0

    def __init__(self, attempts: int) -> None:
        super().__init__(3, 1.0)
        Flaky.made += 1
        self.fails = Flaky.made < attempts

    async def step(self, text: str) -> Observation:
        observation = await super().step(text)
        if self.fails and self.left == 1:
            raise OSError("the connection is lost")
        return observation


@pytest.mark.parametrize(("retries", "attempts", "failure"), [(0, 2, "OSError"), (2, 3, None), (2, 4, "OSError")])
def test_a_failed_trajectory_is_played_again_as_often_as_allowed(
    retries: int, attempts: int, failure: str | None
) -> None:
    Flaky.made = 0
    (whole,), _ = script_play(lambda: Turns(3, 1.0), rows_of(["?"]))
    (played,), _ = script_play(lambda: Flaky(attempts), rows_of(["?"]), replace(LIMITS, retries=retries))
    assert (played.failure, played.attempt) == (failure, retries)
    assert failure or (played.tokens, played.rewards) == (whole.tokens, whole.rewards)


class Debate:
    """The role `rival` opens, and `actor` answers; the end rewards both. A third role's name comes from the prompt."""

    async def reset(self, example: dict[str, Any]) -> Observation:
        self.said, self.third = 0, example["prompt"]
        return Observation("open", policy="rival")

    async def step(self, text: str) -> Observation:
        self.said += 1
        policy = ("actor", "rival", self.third)[self.said - 1] if self.said < 4 else None
        end = {"done": True, "rewards": {"rival": 2.0, "actor": -1.0}} if self.said == 4 else {}
        return Observation(f"{self.said}", reward=0.5, policy=policy, **end)  # type: ignore[arg-type]


def test_each_policy_has_its_own_context_turns_and_rewards_in_one_episode() -> None:
    (played, failed), _ = script_play(Debate, rows_of(["actor", "judge"]), policies=("rival", "idle"))
    said = make_chat_tokenizer(None).decode
    assert [said(one.tokens) for one in played.every] == ["1ab<end>3ab<end>", "openab<end>2ab<end>", "actor"]
    assert [one.rewards for one in played.every] == [[0.5, -0.5], [0.5, 2.5], []]
    columns = [trajectory_columns([one], LIMITS) for one in played.every]
    assert [(float(c["score"]), float(c["statistics_mask"])) for c in columns] == [(0, 1), (3, 1), (0, 0)]  # type: ignore[arg-type]
    assert failed.failure == "policy" and "rival, idle play" in failed.detail
    assert all(one.finish_reason is FinishReason.ERROR for one in failed.every)


def test_an_episode_ends_after_its_time_limit_and_is_counted() -> None:
    (played,), seconds = script_play(lambda: Turns(8, 10.0), rows_of(["?"]), replace(LIMITS, episode_timeout_s=25.0))
    assert (played.failure, played.turns) == ("timeout", 4) and seconds < 35


def test_a_hanging_plain_function_delays_neither_other_rows_nor_the_end() -> None:
    tokenizer = make_chat_tokenizer(None)
    limits = Limits(at_once=4, timeout_s=1.0, max_turns=8, max_sequence_tokens=300)
    make = environments(f"{HERE}:play_slowly", {})
    episodes = EnvironmentPlayer(
        Script(tokenizer, ["ab"]), make, turn_template(tokenizer), TurnSampling(SamplingParams(), 300), limits=limits
    )  # type: ignore[arg-type]
    played = asyncio.run(episodes.play(rows_of(["?"], samples=4)))
    assert not LATE, "the call is still hanging"
    RELEASED.set()
    assert [episode.failure for episode in played] == ["timeout", None, None, None]


def test_a_plain_function_sees_every_turn_and_the_example() -> None:
    tokenizer = make_chat_tokenizer(None)
    make = environments(f"{HERE}:is_long", {"length": 2})
    episodes = EnvironmentPlayer(
        Script(tokenizer, ["a", "abc"]),
        make,
        turn_template(tokenizer),
        TurnSampling(SamplingParams(), 300),
        limits=LIMITS,
    )  # type: ignore[arg-type]
    (episode,) = asyncio.run(episodes.play(rows_of(["?"])))
    assert (episode.turns, episode.score, episode.finish_reason) == (2, 4.0, FinishReason.STOP)


def test_trajectories_end_at_their_turns_and_where_a_sequence_has_no_room() -> None:
    (by_turns,), _ = script_play(lambda: Turns(100), rows_of(["?"]))
    assert (by_turns.turns, by_turns.finish_reason) == (8, FinishReason.LENGTH)
    tokens = len(by_turns.tokens)
    for limit in range(2, tokens):
        limits = Limits(at_once=1, timeout_s=30, max_turns=8, max_sequence_tokens=limit)
        (episode,), _ = script_play(lambda: Turns(100), rows_of(["?"]), limits)
        assert episode.finish_reason is FinishReason.LENGTH
        assert len(episode.tokens) <= limit
        assert episode.tokens == by_turns.tokens[: len(episode.tokens)]
        assert episode.actions[-1], "an observation without a following action is not appended"
    with pytest.raises(UserError, match=r"context of 3 tokens .*raise rollout.max_sequence_tokens"):
        script_play(Turns, rows_of(["???"]), Limits(1, 30, 8, 3))


def test_an_aborted_trajectory_keeps_its_tokens_so_far() -> None:
    engine = EngineReplica(EmbeddedEngine(make_model(), make_tokenizer(), Decoding(16, 300)))
    turns = TurnSampling(SamplingParams(max_tokens=30, ends=False), 300)
    episodes = EnvironmentPlayer(engine, Turns, turn_template(make_tokenizer()), turns, limits=LIMITS)  # type: ignore[arg-type]

    async def run() -> list[Trajectory]:
        task = asyncio.ensure_future(episodes.play(make_rows(make_tokenizer(), ["a", "b"])))
        while not task.done():
            await asyncio.sleep(0)
            # Between two turns the engine does not have the row.
            if engine.engine.tokens_generated >= 80 and (0, 0, 0) in engine._ended:
                await engine.abort((0, 0, 0))
                break
        return await task

    aborted, other = asyncio.run(run())
    assert aborted.finish_reason is FinishReason.ABORT and aborted.failure is None
    assert 1 < aborted.turns <= other.turns == 4
    assert 30 <= aborted.action_tokens < 120
    assert aborted.tokens == other_run()[: len(aborted.tokens)]


def other_run() -> list[int]:
    """Return the tokens of the first row without an abort."""
    engine = EngineReplica(EmbeddedEngine(make_model(), make_tokenizer(), Decoding(16, 300)))
    episodes = EnvironmentPlayer(
        engine,
        Turns,
        turn_template(make_tokenizer()),
        TurnSampling(SamplingParams(max_tokens=30, ends=False), 300),
        limits=LIMITS,
    )  # type: ignore[arg-type]
    return asyncio.run(episodes.play(make_rows(make_tokenizer(), ["a"])))[0].tokens


class Jittery(Turns):
    """Answers after a time that differs from run to run, so that turns arrive in any order."""

    async def step(self, text: str) -> Observation:
        await asyncio.sleep(0.001 * (id(self) // 64 % 5))
        return await super().step(text)


def test_episodes_have_the_same_tokens_on_one_engine_and_four_replicas() -> None:
    rows = make_rows(make_tokenizer(), ["one", "another", "a third"], samples=6)
    model, tokenizer = make_model(), make_tokenizer()

    def play(replicas: int, slots: int) -> list[tuple[list[int], list[int]]]:
        engines = [EngineReplica(EmbeddedEngine(model, tokenizer, Decoding(slots, 300))) for _ in range(replicas)]
        engine = engines[0] if replicas == 1 else Router(engines)
        episodes = EnvironmentPlayer(
            engine, Jittery, turn_template(tokenizer), TurnSampling(SamplingParams(max_tokens=12), 300), limits=LIMITS
        )  # type: ignore[arg-type]
        return [(e.tokens, e.sequence_lengths) for e in asyncio.run(episodes.play(rows))]

    assert play(1, 64) == play(4, 16)


def test_rows_of_a_group_are_given_the_same_seed_and_groups_others() -> None:
    made: list[Turns] = []

    def make() -> Turns:
        made.append(Turns(1))
        return made[-1]

    script_play(make, rows_of(["a", "b"], samples=3))
    seeds = [(environment.example["group"], environment.example["seed"]) for environment in made]
    assert len(seeds) == 6 and len(set(seeds)) == 2


@pytest.mark.parametrize("said", [None, 3, ["text"], [{"content": "no role"}]])
def test_an_observation_must_be_text_or_messages(said: Any) -> None:
    with pytest.raises(TypeError, match="returns text or messages"):
        Observation(said)


class WithoutExample:
    def reset(self) -> str:
        return ""

    async def step(self, text: str) -> Observation:
        return Observation(text)


def test_an_environment_that_cannot_be_called_is_refused_before_the_run() -> None:
    with pytest.raises(UserError, match=r"WithoutExample: reset\(self\) -> .*\(self, example\): too"):
        environments(f"{HERE}:WithoutExample", {})
    with pytest.raises(UserError, match=r"\(begin=...\): .*unexpected .*'begin'"):
        environments(f"{HERE}:WithoutExample", {"begin": 5})
    with pytest.raises(UserError, match=r"WithoutExample.*\(base_url, example\): too many"):
        environments(f"agent:{HERE}:WithoutExample", {})


def test_an_unknown_environment_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"Limits .*lacks reset and step"):
        environments("braidrl.agents.player:Limits", {})
    with pytest.raises(UserError, match="has no function 'Turn'"):
        environments(f"{HERE}:Turn", {})


def test_a_score_that_is_none_has_the_same_reason_in_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("async def act(base_url, example):\n    return float('nan')\n")
    answer = answerer(f"agent:{tmp_path}/mine.py:act", {})
    answer("load", None)
    result = asyncio.run(answer("act", ["http://127.0.0.1", {}]))  # type: ignore[arg-type]
    assert result["failure"] == "TypeError" and "nan" in result["detail"]
