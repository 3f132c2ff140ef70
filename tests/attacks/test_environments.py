"""Environments, tools and agents in the sandbox: whatever one does is its own row's counted failure, and nothing of it
is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from braidrl.agents.endpoint import Endpoint
from braidrl.agents.player import AgentPlayer, EnvironmentPlayer
from braidrl.agents.sandboxed import EnvironmentHosts, observation_of
from braidrl.agents.trajectory import Limits, Trajectory, TurnSampling
from braidrl.agents.turns import EnvironmentFailed
from braidrl.config import EnvironmentConfig
from braidrl.data.rows import FinishReason
from braidrl.engines.requests import SamplingParams
from braidrl.errors import UserError
from tests.agents.chat import Script, make_chat_tokenizer, make_rows, turn_template
from tests.attacks.test_verifiers import MARK, has_walls, nothing_is_left  # noqa: F401 (a fixture of every test)
from tests.cases import soak_but
from tests.tiny import Workshop, braid

pytestmark = pytest.mark.skipif(not has_walls("process"), reason="this system gives no process namespaces of its own")
ATTACKERS = str(Path(__file__).with_name("environments.py"))
LIMITS = Limits(at_once=200, timeout_s=30, max_turns=8, max_sequence_tokens=2000)
METADATA = {"run": os.getpid(), "siblings": [], "mark": MARK, "port": 0, "file": "", "seconds": 0}
FAILURES = {
    "bombs_with_forks": ("died", "more than"),
    "takes_ten_gigabytes": ("MemoryError", ""),
    "takes_it_in_many_processes": ("died", "took more than 1 GiB"),
    "prints_a_gigabyte": ("OSError", "File too large"),
    "says a gigabyte": ("MemoryError", ""),
    "kills_the_run": ("RuntimeError", "no process was there"),
    "traces_the_run": ("PermissionError", "no such process may be traced"),
    "reads_the_environment": ("LookupError", "no secret was found"),
    "forges_results": ("died", "exit status 0"),
    "writes answers of its own": ("result", "not plain data: it is nested more than"),
    "leaves_a_daemon": ("died", "exit status 4"),
}


def settings(name: str = "Attacked", **more: Any) -> EnvironmentConfig:
    params = METADATA | more.pop("params", {})
    return EnvironmentConfig(
        name=f"{ATTACKERS}:{name}", params=params, **{"memory_gib": 1.0, "timeout_s": 30.0, **more}
    )


def played(prompts: list[str], config: EnvironmentConfig, says: str = "ab") -> list[Trajectory]:
    with opened(config) as environments:
        return play(environments, prompts, says)


@contextlib.contextmanager
def opened(config: EnvironmentConfig) -> Iterator[EnvironmentHosts]:
    hosts = EnvironmentHosts(config)
    try:
        yield hosts
    finally:
        hosts.close()


def play(
    hosts: EnvironmentHosts,
    prompts: list[str],
    says: str = "ab",
    seconds: float = 0.0,
    note: Callable[[Trajectory], None] = lambda episode: None,
) -> list[Trajectory]:
    """The episodes of rows that do what their prompts say, all at once; the engine takes so many seconds for a turn."""
    tokenizer = make_chat_tokenizer("chatml")
    rows, name = make_rows(tokenizer, prompts), hosts.settings.name
    assert name is not None
    turns = TurnSampling(SamplingParams(), 2000)
    template, script = turn_template(tokenizer), Script(tokenizer, [says], seconds)

    async def run() -> list[Trajectory]:
        if not name.startswith("agent:"):
            make = hosts.find(name)
            return await EnvironmentPlayer(script, make, template, turns, limits=LIMITS, on_finished=note).play(rows)  # type: ignore[arg-type]
        async with Endpoint(script, template, turns, listener=hosts.listener(name)) as endpoint:  # type: ignore[arg-type]
            return await AgentPlayer(endpoint, hosts.find(name), limits=LIMITS).play(rows)

    return asyncio.run(run())


def test_an_attack_fails_its_own_row_and_no_other_trajectory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET", "hush")
    prompts = ["fine", *FAILURES, "fills shared memory", "fine"]
    by_prompt = dict(zip(prompts[1:], played(prompts, settings())[1:], strict=True))
    for name, (reason, detail) in FAILURES.items():
        episode = by_prompt[name]
        assert episode.failure == reason and detail in episode.detail, (name, episode.failure, episode.detail)
        assert episode.finish_reason is FinishReason.ERROR and episode.turns == 2
    for name in ("fine", "fills shared memory"):
        assert (by_prompt[name].failure, by_prompt[name].score, by_prompt[name].turns) == (None, 1.0, 2)
    assert not Path("/dev/shm", MARK).exists()


def test_tools_attack_themselves_alone() -> None:
    calls = ["fine", "kills_the_run", "reads_the_environment", "forges_results", "bombs_with_forks"]
    call = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    fine, killing, reading, forging, bombing = played(calls, settings("Tools"), says=call)
    assert (fine.failure, fine.finish_reason) == (None, FinishReason.LENGTH)
    text = make_chat_tokenizer("chatml").decode
    assert "found 0.5" in text(fine.tokens)
    assert "RuntimeError: no process was there" in text(killing.tokens), "the model reads what a tool raises"
    assert "no secret was found" in text(reading.tokens)
    assert {forging.failure, bombing.failure} == {"died"}


def test_an_agent_that_attacks_or_hangs_ends_its_own_row() -> None:
    agent = settings("act", timeout_s=5.0)
    agent = agent.model_copy(update={"name": f"agent:{agent.name}"})
    fine, spinning, killing = played(["fine", "spins", "kills_the_run"], agent)
    assert (fine.failure, fine.score, fine.turns) == (None, 0.5, 1)
    assert (spinning.failure, spinning.turns, killing.failure) == ("timeout", 1, "RuntimeError")


def test_with_bubblewrap_an_agent_reaches_its_endpoint_and_nothing_else() -> None:
    secret = Path.home() / f".braid-secret-{os.getpid()}"
    secret.write_text("hush")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            params = {"port": server.getsockname()[1], "file": str(secret)}
            agent = settings("act", params=params, sandbox="bubblewrap")
            agent = agent.model_copy(update={"name": f"agent:{agent.name}"})
            with opened(agent) as hosts:
                for _ in range(2):
                    fine, connecting, reading = play(hosts, ["fine", "opens_a_socket", "reads_the_home"])
                    assert (fine.failure, fine.score, fine.turns) == (None, 0.5, 1)
                    assert (connecting.failure, reading.failure) == ("ConnectionRefusedError", "FileNotFoundError")
    finally:
        secret.unlink()


def killed_while_playing(hosts: EnvironmentHosts, depth: int) -> list[Trajectory]:
    """Episodes of which the host or its copy is killed once, in the midst of a turn; the two processes above are
    bubblewrap's.
    """

    async def kill() -> None:
        process = hosts._host(str(hosts.settings.name)).process
        assert process is not None
        host = process.pid
        while True:
            family = [host, *(child.pid for child in psutil.Process(host).children(recursive=True))]
            outcome = [pid for pid in family if depth_of(pid, host) == depth]
            if len(family) == 4 and outcome:
                os.kill(outcome[0], signal.SIGKILL)
                return
            await asyncio.sleep(0.01)

    async def run() -> list[Trajectory]:
        tokenizer = make_chat_tokenizer("chatml")
        make = hosts.find(str(hosts.settings.name))
        episodes = EnvironmentPlayer(
            Script(tokenizer, ["ab"]),
            make,
            turn_template(tokenizer),
            TurnSampling(SamplingParams(), 2000),
            limits=LIMITS,
        )  # type: ignore[arg-type]
        outcome, _ = await asyncio.gather(episodes.play(make_rows(tokenizer, ["sleeps"])), kill())
        return outcome

    return asyncio.run(run())


def depth_of(pid: int, root: int) -> int:
    depth = 0
    while pid != root:
        pid, depth = psutil.Process(pid).ppid(), depth + 1
    return depth


@pytest.mark.parametrize("depth", [2, 3], ids=["host", "copy"])
def test_a_trajectory_whose_process_is_killed_from_outside_is_played_once_more(depth: int) -> None:
    with opened(settings(params={"seconds": 1})) as hosts:
        (episode,) = killed_while_playing(hosts, depth)
        assert (episode.failure, episode.turns, episode.score) == (None, 2, 1.0), (episode.failure, episode.detail)
        assert play(hosts, ["fine"])[0].failure is None, "the host is there again"


@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
def test_an_interpreter_behind_a_link_in_the_working_folder_starts(
    sandbox: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked").symlink_to(sys.prefix)
    (episode,) = played(["fine"], settings(sandbox=sandbox, python=tmp_path / "linked/bin/python"))
    assert (episode.failure, episode.score) == (None, 1.0), episode.detail


def test_copies_of_cancelled_trajectories_end_at_once_and_forgotten_ones_with_the_run() -> None:
    with opened(settings(params={"seconds": 600})) as hosts:
        make, tokenizer = hosts.find(str(hosts.settings.name)), make_chat_tokenizer("chatml")
        started = hosts._host(str(hosts.settings.name)).process
        assert started is not None
        host = psutil.Process(started.pid)

        async def copies(number: int) -> None:
            """Wait for so many copies; the two processes above them are bubblewrap's and the host."""
            async with asyncio.timeout(30):
                while len(host.children(recursive=True)) != 2 + number:
                    await asyncio.sleep(0.02)

        async def run() -> None:
            forgotten: Any = await make()
            await forgotten.reset({"prompt": "sleeps"})
            script = Script(tokenizer, ["ab"])
            player = EnvironmentPlayer(
                script, make, turn_template(tokenizer), TurnSampling(SamplingParams(), 2000), limits=LIMITS
            )  # type: ignore[arg-type]
            playing = asyncio.ensure_future(player.play(make_rows(tokenizer, ["sleeps"] * 2)))
            while list(script.turns.values()) != [2, 2]:  # both are in the turn that sleeps
                await asyncio.sleep(0.02)
            await copies(3)
            playing.cancel()
            await copies(1)

        asyncio.run(run())
        processes = [host, *host.children(recursive=True)]
    _, running = psutil.wait_procs(processes, timeout=30)
    assert not running


def test_processes_of_environments_and_programs_load_no_heavy_modules() -> None:
    names = (
        "braidrl.sandbox.host, braidrl.agents.environments, braidrl.rewards.verifier, braidrl.rewards.programs, "
        "braidrl.config, braidrl.cluster.child, braidrl.cluster.ray_processes"
    )
    asked = f"import sys; import {names}; print('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_environment_that_cannot_be_imported_there_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "needing.py").write_text("import os\nos.environ['LICENSE_KEY']\nclass Game:\n    pass\n")
    config = EnvironmentConfig(name=f"{tmp_path}/needing.py:Game")
    with pytest.raises(UserError, match=r"sandbox .*'LICENSE_KEY'.*rollout\.environment\.variables"):
        played(["fine"], config)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"said": "a", "reward": None, "done": True, "restart": False},
        {"reward": 1.0, "done": 1, "restart": False},
        {"reward": 10**400, "done": True, "restart": False},
        {"reward": float("nan"), "done": True, "restart": False},
        {"reward": 1.0, "done": True, "restart": False, "correct": 3},
        {"said": 3, "reward": 1.0, "done": True, "restart": False},
    ],
)
def test_an_answer_that_is_no_observation_is_a_failure(answer: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentFailed, match=r"result: .* answer that is none"):
        observation_of(answer)


@pytest.mark.soak
def test_ten_attacks_slow_190_other_trajectories_by_at_most_a_fifth() -> None:
    attacks = [*FAILURES][:10]

    def rate(prompts: list[str]) -> float:
        """Return trajectories per second of rows without attacks."""
        with opened(settings(timeout_s=20.0)) as hosts:
            ended: list[float] = []

            def note(episode: Trajectory) -> None:
                if episode.failure is None:
                    ended.append(time.monotonic())

            play(hosts, ["fine"])  # the host has started
            started = time.monotonic()
            episodes = play(hosts, prompts, seconds=2.0, note=note)
            assert sum(one.failure is not None for one in episodes) == len(prompts) - prompts.count("fine")
            return len(ended) / (max(ended) - started)

    quiet, beside = rate(["fine"] * 200), rate([*["fine"] * 95, *attacks, *["fine"] * 95])
    print(f"200 at once: {quiet:.1f} trajectories a second, {beside:.1f} beside {len(attacks)} attacks")
    assert beside >= 0.8 * quiet


@pytest.mark.parametrize("mode", ["process", "bubblewrap"])
def test_an_environment_plays_after_the_thread_that_started_its_host_ended(mode: str) -> None:
    """Attack 8."""
    config = settings(sandbox=mode)
    with opened(config) as hosts:
        starting = threading.Thread(target=lambda: hosts.find(str(config.name)))
        starting.start()
        starting.join()
        for episode in play(hosts, ["fine"] * 4):
            assert (episode.failure, episode.turns, episode.score) == (None, 2, 1.0), (episode.failure, episode.detail)


ENVIRONMENT = (
    "from braidrl.agents.environments import Observation\n\n\nclass Plain:\n    def reset(self, example):\n        "
    "{}\n\n    def step(self, text):\n        return Observation('', 1.0, True)\n"
)


# The sandbox, what `reset` does, and the exit status of the run.
RUNS = {
    "plays in bubblewrap": ("bubblewrap", "return None", 0),
    "plays in process": ("process", "return None", 0),
    "raises": ("process", "raise OSError('no game')", 1),
    "dies": ("process", "import os; os._exit(3)", 1),
}


@pytest.mark.parametrize("kind", soak_but(["plays in process", "raises"], RUNS))
def test_a_run_succeeds_with_an_environment_and_fails_if_all_trajectories_fail(workshop: Workshop, kind: str) -> None:
    mode, body, code = RUNS[kind]
    (workshop.folder / "plain.py").write_text(ENVIRONMENT.format(body))
    config = workshop.config_file(
        rollout={"environment": {"name": "plain.py:Plain", "sandbox": mode}}, trainer={"steps": 1}, trackers=[]
    )
    with braid("train", config, folder=workshop.folder) as process:
        output = "".join(text or "" for text in process.communicate(timeout=200))
    assert process.returncode == code, output
    assert code == 0 or "trajectories failed" in " ".join(output.split()), output
