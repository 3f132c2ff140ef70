"""Tasks of the package `harbor`, each played as one trial in the trajectory's process.

folders of tasks ──read at import──▶ a trial of harbor: agent ──commands──▶ TrajectoryEnvironment, or one of harbor's
                                             │ its requests                        └── the task's tests ──▶ reward
                                             ▼
                                          endpoint

The trajectory's process has the folders of a container, such as /app, and its sandbox is the container's wall. A task's
tests and solution are in memory while the agent works: its commands cannot read them.
"""

import asyncio
import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from harbor.agents.factory import AgentFactory
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.hooks import TrialEvent, TrialHookEvent
from harbor.trial.trial import Trial

from braidrl.errors import UserError
from braidrl.importing import import_function

# A trial imports its kind and litellm when it starts: here they are imported once, without a look at the network.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "true")
importlib.import_module("harbor.trial.single_step")

Files = dict[str, tuple[int, bytes]]
"""The mode and the bytes of each file of a folder, by its path there."""
WORKING_FOLDER = "/app"
DEFINITIONS = ("Dockerfile", "docker-compose.yaml")
"""Files of a task that define its image, which a sandbox does not build."""
HIDDEN = ("tests", "solution")
"""Folders of a task that are not files while its agent works."""


class TrajectoryEnvironment(BaseEnvironment):
    """An environment whose commands are processes of the trajectory's process, in folders that it alone sees.

    The task's image is not built: commands have the machine's programs and this interpreter's packages. Files of the
    task's folder `environment` are in the working folder.
    """

    @staticmethod
    def type() -> str:
        return "braid"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        """Accept any definition: the sandbox is the image."""

    async def start(self, force_build: bool) -> None:
        self._folder = Path(self.task_env_config.workdir or WORKING_FOLDER)
        self._folder.mkdir(parents=True, exist_ok=True)
        if self.environment_dir.is_dir():
            ignored = shutil.ignore_patterns(*DEFINITIONS)
            shutil.copytree(self.environment_dir, self._folder, dirs_exist_ok=True, ignore=ignored)
        await self.ensure_dirs(self._mount_targets())

    async def stop(self, delete: bool) -> None:
        """Leave processes and files to the trajectory's end."""

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self.upload_file(source_path, str(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self.upload_dir(source_dir, str(target_dir))

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command by bash; after `timeout_sec` its processes are killed. All users are the trajectory's."""
        programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        variables = {"PATH": programs, "HOME": str(Path.home()), **(self._merge_env(env) or {})}
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            command,
            cwd=cwd or self._folder,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            printed, errors = await asyncio.wait_for(process.communicate(), timeout_sec)
        except TimeoutError:
            return ExecResult(stderr=f"no result within {timeout_sec} s", return_code=124)
        finally:
            with contextlib.suppress(ProcessLookupError):  # what the command left in the background may live on
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return ExecResult(
            stdout=printed.decode(errors="replace"),
            stderr=errors.decode(errors="replace"),
            return_code=process.returncode or 0,
        )


class Trials:
    """The tasks of a folder, and the agent that plays them, as an agent of a row."""

    HERE: ClassVar[str] = f"{TrajectoryEnvironment.__module__}:{TrajectoryEnvironment.__name__}"

    def __init__(self, folder: Path, agent: str | Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """Read the tasks below `folder`. Raises UserError if there are none, or a setting is none of harbor's."""
        self._tasks = {path.parent: packed(path.parent) for path in sorted(folder.rglob("task.toml"))}
        if not self._tasks:
            raise UserError(f"environment harbor:{folder} has no tasks: no file task.toml is below this folder")
        settings = {"name": agent} if isinstance(agent, str) else dict(agent)
        named = settings.get("name", "")
        if ":" in named:
            kind = import_function(named)
            settings = {**settings, "name": None, "import_path": f"{kind.__module__}:{kind.__name__}"}
        try:
            self._agent = AgentConfig.model_validate({"model_name": "openai/actor", **settings})
            self._environment = EnvironmentConfig.model_validate(dict(environment) or {"import_path": self.HERE})
            AgentFactory.get_agent_class_from_config(self._agent)
        except ValueError as error:
            raise UserError(f"environment harbor:{folder}: {' '.join(str(error).split())[:500]}") from error

    async def __call__(self, url: str, example: dict[str, Any]) -> float:
        """Play the task of a row's group against the endpoint, and return its tests' reward.

        Raises RuntimeError if the trial failed.
        """
        clients = {"OPENAI_BASE_URL": url, "ANTHROPIC_BASE_URL": url.removesuffix("/v1")}
        keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), example["api_key"])
        os.environ.update({**clients, **keys})
        folder = list(self._tasks)[example["group"] % len(self._tasks)]
        task = Path(tempfile.mkdtemp()) / folder.name
        unpack(self._tasks[folder], task)
        config = TrialConfig(
            task=TaskConfig(path=task),
            trials_dir=Path(tempfile.mkdtemp()),
            agent=self._agent,
            environment=self._environment,
        )
        trial = await Trial.create(config)

        async def hide(event: TrialHookEvent) -> None:
            for name in HIDDEN:
                shutil.rmtree(task / name, ignore_errors=True)

        async def show(event: TrialHookEvent) -> None:
            unpack(self._tasks[folder], task)

        trial.add_hook(TrialEvent.AGENT_START, hide)
        trial.add_hook(TrialEvent.VERIFICATION_START, show)
        result = await trial.run()
        if result.verifier_result is None or not result.verifier_result.rewards:
            failed = result.exception_info
            reason = f"{failed.exception_type}: {failed.exception_message}" if failed else "its tests gave no reward"
            raise RuntimeError(f"the trial of {folder.name} failed: {reason}"[:600])
        rewards = result.verifier_result.rewards
        return float(rewards["reward"] if "reward" in rewards else sum(rewards.values()) / len(rewards))


def packed(folder: Path) -> Files:
    """Return the files of a folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes()) for path in paths}


def unpack(files: Files, folder: Path) -> None:
    """Write files to a folder; those that are there are kept."""
    for name, (mode, content) in files.items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(mode)
