"""mini-swe-agent as an agent of harbor: its commands run in whichever environment harbor has started."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from agent import work_on  # the file beside this one
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from minisweagent.environments.local import LocalEnvironment


class HarborCommands(LocalEnvironment):
    """mini-swe-agent's environment, of which harbor's runs the commands."""

    def __init__(self, environment: BaseEnvironment, loop: asyncio.AbstractEventLoop, **settings: Any) -> None:
        super().__init__(**settings)
        self._environment, self._loop = environment, loop

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        asked = self._environment.exec(action["command"], timeout_sec=timeout or self.config.timeout)
        result = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        text = (result.stdout or "") + (result.stderr or "")
        output = {"output": text, "returncode": result.return_code, "exception_info": ""}
        self._check_finished(output)
        return output


class MiniSweAgent(BaseAgent):
    """mini-swe-agent outside of the environment."""

    def __init__(self, *arguments: Any, config: str = "mini.yaml", steps: int = 10, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._config, self._steps = config, steps

    @staticmethod
    def name() -> str:
        return "mini-swe-agent-outside"

    def version(self) -> str:
        return "2.4.6"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Install nothing: it runs in this process."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        commands = HarborCommands(environment, asyncio.get_running_loop())
        url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
        await asyncio.to_thread(work_on, instruction.strip(), commands, url, key, self._config, self._steps)
