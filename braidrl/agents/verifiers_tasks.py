"""Tasks of the package `verifiers`, 0.4 or later, played in the trajectory's own process.

taskset ──a task──▶ harness, a program in `TrajectoryRuntime` ──its requests──▶ verifiers' relay ──▶ the endpoint
                                                                     the task's rewards ◀── the trace

The harness, its tools and the task's hooks are processes of the trajectory's process: the sandbox that walls this one
in walls them in too.
"""

import hashlib
import itertools
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

from braidrl.errors import UserError
from braidrl.importing import import_function

KEY_VARIABLE = "BRAID_ENDPOINT_KEY"
"""The variable of the endpoint's key, in the trajectory's process."""


class TrajectoryRuntime(SubprocessRuntime):
    """A runtime whose programs are processes beside this one, in a folder of the trajectory.

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


class TaskSets:
    """A taskset and the harness that plays it, as an agent of a row."""

    def __init__(self, name: str, harness: str, settings: Mapping[str, Any]) -> None:
        """Load the taskset `name`, installed or of a file, with settings of its configuration.

        Raises UserError if there is none.
        """
        try:
            place = imported(name) if name.endswith(".py") else name
            config = taskset_config_type(place).model_validate({"id": place, **settings})
            self._taskset = load_taskset(config)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            said = " ".join(str(error).split())[:500]
            raise UserError(f"environment verifiers:{name}: {type(error).__name__}: {said}") from error
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
        await runtime.start()
        try:
            trace = await vf.make_agent(config).run(self._task(example["group"]), runtime=runtime)
        finally:
            await runtime.stop()
        if not trace.ok:
            reasons = "; ".join(f"{error.type}: {error.message}" for error in trace.errors)
            raise RuntimeError(f"its rollout failed: {reasons}"[:600])
        return float(trace.reward)

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
