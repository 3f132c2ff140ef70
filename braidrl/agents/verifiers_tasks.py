"""Tasks of the package `verifiers`, 0.4 or later, played in the trajectory's process.

taskset ──a task──▶ environment ──▶ harness, a program in `TrajectoryRuntime` ──its requests──▶ verifiers' relay ──▶ the
                                                                     rewards ◀── the trace                     endpoint

The harness, its tools and the task's hooks are processes of the trajectory's process: the sandbox of this process
contains them too.
"""

import hashlib
import itertools
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.agent import Agent, Agents, Interaction
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.episode import EnvInfo, Episode
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.trace import TraceTask
from verifiers.v1.utils.loaders import env_config_type, load_environment

from braidrl.errors import UserError
from braidrl.importing import import_function

KEY_VARIABLE = "BRAID_ENDPOINT_KEY"
"""The variable of the endpoint's key, in the trajectory's process."""


class TrajectoryRuntime(SubprocessRuntime):
    """A runtime whose programs are processes of this one, in a folder of the trajectory.

    A program's script runs in this interpreter, which must have the packages that it needs: a sandbox does not install
    any.
    """

    async def start(self) -> None:
        self.workdir = Path(tempfile.mkdtemp(prefix="verifiers-"))
        self.info.id = str(self.workdir)

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        """Write a script to the folder, and return the command that runs it."""
        assert self.workdir is not None
        data = script.encode() if isinstance(script, str) else script
        path = f"{hashlib.sha256(data).hexdigest()}.py"
        await self.write(path, data)
        return [sys.executable, str(self.workdir / path)]


class TrajectoryAgent(Agent):
    """The agent of an episode: its programs run in the trajectory's runtime."""

    def __init__(self, config: vf.AgentConfig, runtime: TrajectoryRuntime) -> None:
        super().__init__(config)
        self.runtime, self.traces = runtime, list[vf.Trace]()

    async def run(self, task: Any, **more: Any) -> vf.Trace:
        trace: vf.Trace = await super().run(task, **{"runtime": self.runtime, **more})
        self.traces.append(trace)
        return trace

    @asynccontextmanager
    async def interaction(self, task: Any, **more: Any) -> AsyncIterator[Interaction]:
        async with super().interaction(task, **{"runtime": self.runtime, **more}) as interaction:
            self.traces.append(interaction.trace)
            yield interaction


class TaskSets:
    """A taskset with its environment, and the harness that plays it, as an agent of a row."""

    def __init__(self, name: str, harness: str, settings: Mapping[str, Any]) -> None:
        """Load the taskset `name`, installed or of a file, with settings of its configuration.

        Raises UserError if there is none.
        """
        try:
            module = imported(name) if name.endswith(".py") else name
            kind = env_config_type(module)
            roles = list(agent_config_fields(kind()))
            if len(roles) != 1:
                raise ValueError(f"its environment has {len(roles)} agents, {', '.join(roles)}, and Braid plays one")
            agents = {role: {"harness": {"id": harness}} for role in roles}
            self._environment = load_environment(kind.model_validate({"taskset": {"id": module, **settings}, **agents}))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:500]
            raise UserError(f"environment verifiers:{name}: {type(error).__name__}: {reason}") from error
        self._taskset = self._environment.taskset
        self._tasks = list(self._taskset) if self._taskset.bounded else None
        self._harness = harness

    async def __call__(self, url: str, example: dict[str, Any]) -> float:
        """Play a row's task against the endpoint, and return the task's reward. Raises RuntimeError if it failed."""
        os.environ[KEY_VARIABLE] = example["api_key"]
        client = vf.EvalClientConfig(base_url=url, api_key_var=KEY_VARIABLE)
        config = vf.AgentConfig(
            harness={"id": self._harness}, runtime=vf.SubprocessConfig(), model="actor", client=client
        )
        runtime = TrajectoryRuntime(vf.SubprocessConfig())
        agent, task, environment = TrajectoryAgent(config, runtime), self._task(example["group"]), self._environment
        agents = Agents(environment.config, lambda name, _: agent)
        await runtime.start()
        try:
            await environment.setup(agents)
            await environment.run(task, agents)
            about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
            episode = Episode(env=EnvInfo(id=environment.config.env_id), task=about, traces=agent.traces)
            await environment.finalize(task, episode)
        finally:
            await runtime.stop()
        errors = [error for trace in agent.traces if not trace.ok for error in trace.errors]
        if errors or not agent.traces:
            reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
            raise RuntimeError(f"its rollout failed: {reasons or 'its environment ran no agent'}"[:600])
        return sum(float(trace.reward) for trace in agent.traces) / len(agent.traces)

    def _task(self, number: int) -> Any:
        if self._tasks is not None:
            return self._tasks[number % len(self._tasks)]
        return next(itertools.islice(iter(self._taskset), number, None))


def imported(path: str) -> str:
    """Import a file that exports a taskset, and return the name under which verifiers finds it.

    Raises UserError for a file without `__all__`.
    """
    (first, *_) = import_function(f"{path}:__all__", list)
    module = sys.modules[import_function(f"{path}:{first}").__module__]
    name = Path(path).stem.replace("-", "_").lower()
    sys.modules.setdefault(name, module)
    return name
