"""Tasks of harbor are played by an agent of harbor, and their tests give the reward."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from braidrl.agents.endpoint import Endpoint
from braidrl.agents.player import AgentPlayer
from braidrl.agents.sandboxed import EnvironmentHosts
from braidrl.agents.trajectory import Limits, Trajectory, TurnSampling
from braidrl.config import EnvironmentConfig, load_config
from braidrl.engines.requests import SamplingParams
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from examples.coding_agent import demo
from examples.coding_agent.task import issue
from tests.agents.chat import Script, make_chat_tokenizer, make_rows, turn_template
from tests.agents.library_servers import AGENTS, need, one_step
from tests.tiny import ROOT

EXAMPLE = ROOT / "examples" / "coding_agent"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SEARCH = "find / -name 'test_total*' 2>/dev/null | wc -l | sed 's/^/files of tests: /'"


def bash(command: str) -> str:
    """Return a call of mini-swe-agent's tool, as a model writes it."""
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


def played(tasks: Path, says: list[str]) -> Trajectory:
    """Return the episode in which a model says these texts."""
    agent = {"name": f"{EXAMPLE / 'harbor_agent.py'}:MiniSweAgent", "kwargs": {"config": "short.yaml", "steps": 4}}
    params = {"agent": agent}
    config = EnvironmentConfig(
        name=f"harbor:{tasks}", params=params, python=AGENTS, sandbox="bubblewrap", timeout_s=120
    )
    hosts, tokenizer = EnvironmentHosts(config), make_chat_tokenizer("chatml")
    script, template = Script(tokenizer, says), turn_template(tokenizer)

    async def run() -> list[Trajectory]:
        listener = hosts.listener(str(config.name))
        limits = Limits(at_once=1, timeout_s=120, max_turns=4, max_sequence_tokens=4000)
        sampling = TurnSampling(SamplingParams(), 4000)
        async with Endpoint(script, template, sampling, listener=listener) as endpoint:  # type: ignore[arg-type]
            return await AgentPlayer(endpoint, hosts.find(str(config.name)), limits=limits).play(
                make_rows(tokenizer, ["?"])
            )

    try:
        (episode,) = asyncio.run(run())
    finally:
        hosts.close()
    return episode


@pytest.mark.soak
@pytest.mark.parametrize(("sign", "reward"), [("*", 1.0), ("+", 0.0)])
def test_the_tests_of_a_task_give_the_reward_and_the_agent_cannot_read_them(
    sign: str, reward: float, tmp_path: Path
) -> None:
    need(AGENTS)
    demo.write_task(tmp_path / "tasks" / "one", issue("product", 3, 4))
    says = [bash(f"sed -i 's/@/{sign}/' total.py && {SEARCH}"), bash(SUBMIT)]
    episode = played(tmp_path / "tasks", says)
    assert (episode.failure, episode.turns, episode.score) == (None, 2, reward), episode.detail
    assert "files of tests: 0" in make_chat_tokenizer("chatml").decode(episode.tokens)


@pytest.mark.soak
def test_a_step_trains_on_exactly_what_was_generated_in_tasks_of_harbor(tmp_path: Path) -> None:
    need(AGENTS)
    demo.prepare(tmp_path / "data", seed=1)
    run, rows = one_step(
        EXAMPLE / "harbor.yaml",
        f"rollout.environment.python={AGENTS}",
        f"model={tmp_path}/data/untrained",
        f"data.train={tmp_path}/data/train.jsonl",
        f"output={tmp_path}",
        f"rollout.environment.harbor={tmp_path}/data/tasks",
    )
    line = read_metrics(run)[-1]
    assert len(rows) == 3 and not [name for name in line if name.startswith("environment/failures/")]
    assert line["train/rollout_log_prob_gap"] < 1e-5


def test_tasks_of_harbor_need_the_strict_sandbox_or_an_environment_of_harbor(tmp_path: Path) -> None:
    tree = ["flow=grpo", "model=m", "data.train=t", f"rollout.environment.name=harbor:{tmp_path}"]
    with pytest.raises(UserError, match="sandbox=bubblewrap"):
        load_config(None, tree)
    load_config(None, [*tree, "rollout.environment.params={environment: {type: daytona}}"])
