"""Folders that are read while code is imported are empty for every call, and folders that this machine lacks exist."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest

from braidrl.config import EnvironmentConfig
from braidrl.sandbox.hosts import CodeHost, HostedCode, HostSession
from tests.attacks.harness import needs_walls
from tests.tiny import ROOT

CODE = """
import os
TASKS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "tasks")
READ = os.listdir(TASKS)

class Task:
    def reset(self, example):
        new = os.path.join("/app-of-a-task", "new")
        listed = os.listdir("/app-of-a-task")
        open(new, "w").close()
        return {"read": READ, "seen": os.path.exists(TASKS) and os.listdir(TASKS), "before": listed}

    def step(self, text): ...
"""


async def first_context(host: CodeHost) -> Any:
    session = HostSession(host)
    try:
        await session.answer_to(b'{"make": null}\n')
        return (await session.answer_to(b'{"reset": {}}\n'))["context"]
    finally:
        session.close()


@needs_walls
@pytest.mark.parametrize("around", [None, ROOT], ids=("below /tmp", "elsewhere"))
def test_private_folders_are_read_at_import_and_empty_in_every_call(around: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=around, prefix=".private-") as folder:
        tasks, code = Path(folder, "tasks"), Path(folder, "code", "task.py")
        for path, text in ((code, CODE), (tasks / "secret", "the tests")):
            path.parent.mkdir()
            path.write_text(text)
        hosted = HostedCode(
            "environment",
            "braidrl.agents.environments:answerer",
            "rollout.environment",
            EnvironmentConfig(sandbox="bubblewrap"),
            arguments={"name": f"{code}:Task", "params": {}},
            seconds=20,
            answers=3,
            file=code,
            private=(tasks, Path("/app-of-a-task")),
        )
        host = CodeHost(hosted)
        try:
            for _ in range(2):
                assert host.load(None) == {}
                context = asyncio.run(first_context(host))
                assert context["read"] == ["secret"] and not context["seen"] and context["before"] == []
        finally:
            host.close()
