"""Environments of other libraries run on their own servers, and training uses the trajectories that result."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer

from braidrl.agents.endpoint import Endpoint
from braidrl.agents.environments import environments
from braidrl.agents.libraries import LIBRARIES
from braidrl.agents.player import AgentPlayer, EnvironmentPlayer
from braidrl.agents.sandboxed import EnvironmentHosts
from braidrl.agents.trajectory import Limits, Trajectory, TurnSampling
from braidrl.config import EnvironmentConfig, load_config
from braidrl.config.environment import LIBRARIES as NAMED_BY
from braidrl.engines.requests import SamplingParams
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from examples.guess_number import demo as guess_number
from examples.tool_arithmetic import demo, task
from tests.agents.chat import Script, make_chat_tokenizer, make_rows, turn_template
from tests.agents.library_servers import OPENENV, VERIFIERS, calculator, guessing_game, need, one_step

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVER = EXAMPLES / "tool_arithmetic" / "server.py"
LIMITS = Limits(at_once=3, timeout_s=60, max_turns=4, max_sequence_tokens=4000)


def played(config: EnvironmentConfig, says: list[str], prompts: list[str]) -> list[Trajectory]:
    """Return the episodes of rows that all give the same responses."""
    tokenizer = make_chat_tokenizer("chatml")
    hosts = EnvironmentHosts(config)
    try:
        script, template = Script(tokenizer, says), turn_template(tokenizer)
        make = hosts.find(str(config.name))
        return asyncio.run(
            EnvironmentPlayer(script, make, template, TurnSampling(SamplingParams(), 4000), limits=LIMITS).play(
                make_rows(tokenizer, prompts)
            )  # type: ignore[arg-type]
        )
    finally:
        hosts.close()


def failures(run: Path) -> list[str]:
    """Return the reasons why environments ended trajectories."""
    return [name for name in read_metrics(run)[-1] if name.startswith("environment/failures/")]


@pytest.fixture
def mcp_address() -> Iterator[str]:
    with calculator() as port:
        yield f"http://127.0.0.1:{port}/mcp"


@pytest.mark.soak
def test_tools_of_a_command_are_called_and_their_errors_returned() -> None:
    pytest.importorskip("mcp", reason="mcp is not installed")
    calls = task.call("multiply", 7, 8) + task.call("divide", 7, 8) + '<tool_call>{"name": "add"}</tool_call>'
    config = EnvironmentConfig(name=f"mcp:python {SERVER}", timeout_s=60)
    (episode,) = played(config, [calls, "56"], ["what is 7 times 8"])
    text = make_chat_tokenizer("chatml").decode(episode.tokens)
    assert (episode.failure, episode.turns, episode.score) == (None, 2, 0.0), "the example has no answer"
    assert '"name": "multiply"' in text and "Return the product of two numbers." in text, "the prompt lists the tools"
    assert "<tool_response>\n56\n" in text
    assert (
        "error: no tool is called 'divide'; there are add, multiply" in text
        and "error: Error executing tool add" in text
    )


def test_a_server_that_does_not_answer_in_time_leaves_no_process() -> None:
    pytest.importorskip("mcp", reason="mcp is not installed")
    make, before = environments("mcp:python -c 'import sys; sys.stdin.read()'", {}), psutil.Process().children()

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(make(), 0.5)
        assert psutil.Process().children() == before

    asyncio.run(run())


def test_a_step_trains_on_episodes_with_the_tools_of_a_server(mcp_address: str, tmp_path: Path) -> None:
    demo.prepare(tmp_path, seed=1)
    run, rows = one_step(
        EXAMPLES / "tool_arithmetic" / "mcp.yaml",
        f"model={tmp_path / 'untrained'}",
        f"data.train={tmp_path / 'train.jsonl'}",
        "data.eval={}",
        f"output={tmp_path}",
        "evaluation.every=0",
        f"rollout.environment.name=mcp:{mcp_address}",
    )
    assert len(rows) == 3 and failures(run) == [] and (rows["action_tokens"] > 0).all()


@pytest.fixture
def openenv_address() -> Iterator[str]:
    with guessing_game() as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.soak
def test_a_step_is_trained_on_three_episodes_of_a_server_of_environments(openenv_address: str, tmp_path: Path) -> None:
    guess_number.prepare(tmp_path, seed=1)
    run, rows = one_step(
        EXAMPLES / "guess_number" / "openenv.yaml",
        f"rollout.environment.python={OPENENV}",
        f"model={tmp_path / 'model'}",
        f"data.train={tmp_path / 'games.jsonl'}",
        f"output={tmp_path}",
        "name=openenv",
        f"rollout.environment.name=openenv:{openenv_address}",
    )
    line = read_metrics(run)[-1]
    assert (len(rows), failures(run)) == (3, [])
    assert line["environment/turns"] > 1, "the model answers the server's message"
    text = AutoTokenizer.from_pretrained(tmp_path / "model").decode(rows["tokens"][0])
    assert "Guess the number between 1 and 10" in text and ("higher" in text or "lower" in text or "right" in text)


@pytest.mark.soak
def test_a_step_trains_on_episodes_of_an_environment_that_calls_the_endpoint(tmp_path: Path) -> None:
    need(VERIFIERS)
    demo.prepare(tmp_path, seed=1)
    run, rows = one_step(
        EXAMPLES / "tool_arithmetic" / "verifiers.yaml",
        f"rollout.environment.python={VERIFIERS}",
        f"model={tmp_path / 'untrained'}",
        f"data.train={tmp_path / 'train.jsonl'}",
        f"output={tmp_path}",
        "rollout.environment.params.count=1",
        f"rollout.environment.name=verifiers:{EXAMPLES / 'tool_arithmetic' / 'verifiers_sums.py'}",
    )
    assert (len(rows), failures(run), read_metrics(run)[-1]["environment/turns"]) == (3, [], 1)
    gap = read_metrics(run)[-1]["train/rollout_log_prob_gap"]
    assert gap < 1e-5, "the tokens trained are those that were generated"
    text = AutoTokenizer.from_pretrained(tmp_path / "untrained").decode(rows["tokens"][0])
    assert re.match(r"<user> ?what is \d plus \d ?<end>", text), "the question comes from the environment's own data"


@pytest.mark.soak
def test_a_taskset_is_played_in_the_environment_that_it_brings() -> None:
    need(VERIFIERS)
    name = f"verifiers:{Path(__file__).with_name('verifiers_game.py')}"
    hosts = EnvironmentHosts(EnvironmentConfig(name=name, python=VERIFIERS, timeout_s=60, sandbox="bubblewrap"))
    tokenizer = make_chat_tokenizer("chatml")
    script, template = Script(tokenizer, ["ab", "ba"]), turn_template(tokenizer)

    async def run() -> list[Trajectory]:
        listener = hosts.listener(name)
        async with Endpoint(script, template, TurnSampling(SamplingParams(), 500), listener=listener) as endpoint:  # type: ignore[arg-type]
            return await AgentPlayer(endpoint, hosts.find(name), limits=LIMITS).play(make_rows(tokenizer, ["?"]))

    try:
        (episode,) = asyncio.run(run())
    finally:
        hosts.close()
    assert (episode.failure, episode.turns, episode.score) == (None, 2, 0.5), episode.detail
    assert "say ab" in (text := tokenizer.decode(episode.tokens)) and "again" in text


def test_invalid_environment_settings_are_refused_by_name() -> None:
    pytest.importorskip("mcp", reason="mcp is not installed")
    for name, params, message in (
        ("mcp:", {}, "mcp: names no server"),
        ("mcp:no-such-command x", {}, "there is no command 'no-such-command'"),
        ("mcp:http://127.0.0.1:1/mcp", {"verfy": "exact"}, "setting 'verfy'. Did you mean 'verify'"),
        ("mcp:http://127.0.0.1:1/mcp", {"verify": "exat"}, "no verifier is called 'exat'"),
    ):
        with pytest.raises(UserError, match=message):
            environments(name, params)


def test_an_environment_is_named_by_its_library_or_as_a_name(tmp_path: Path) -> None:
    assert set(NAMED_BY) == {"agent", *LIBRARIES}
    (tmp_path / "mine.py").write_text("async def solve(base_url, example): ...\n")
    written = tmp_path / "config.yaml"
    for form in ("{agent: mine.py:solve, timeout_s: 5}", "{name: 'agent:mine.py:solve', timeout_s: 5}"):
        written.write_text(f"flow: grpo\nmodel: m\ndata: {{train: t}}\nrollout: {{environment: {form}}}\n")
        loaded = load_config(written).rollout.environment
        assert (loaded.name, loaded.timeout_s) == (f"agent:{tmp_path / 'mine.py'}:solve", 5.0)
    with pytest.raises(UserError, match="gem and mcp each name"):
        load_config(written, ["rollout.environment={gem: a, mcp: b}"])


def test_a_mistake_in_the_settings_is_told_in_its_own_words_from_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "board.py").write_text("class Board:\n    pass\n")
    hosts = EnvironmentHosts(EnvironmentConfig(name=f"{tmp_path}/board.py:Bord", sandbox="process"))
    with pytest.raises(UserError, match="Did you mean 'Board'") as failed:
        hosts.find(f"{tmp_path}/board.py:Bord")
    hosts.close()
    assert "sandbox=none" not in str(failed.value), "the sandbox is not the reason"
