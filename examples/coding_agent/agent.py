"""mini-swe-agent as it is, on one issue of one repository: `braid train` calls `solve` for each row.

the example's files ──▶ a folder of the row ◀── commands ── mini-swe-agent ◀── base URL ── the model
                              └── the example's tests, which come only now ──▶ the reward
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Read while these packages are imported, inside the sandbox: it has no network and an empty home.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "true", "MSWEA_SILENT_STARTUP": "true"}
os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = tempfile.mkdtemp()
# A repeated request would add a turn that the agent never reads.
os.environ["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = "1"

import litellm
from litellm.exceptions import BadRequestError
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

TESTS_S = 20
litellm.suppress_debug_info = True


def solve(base_url: str, example: dict[str, Any], config: str = "mini.yaml", steps: int = 10) -> float:
    """Return 1 if the tests pass after mini-swe-agent has worked on the issue, else 0."""
    folder = Path(tempfile.mkdtemp())
    write(folder, example["files"])
    work_on(example["prompt"], LocalEnvironment(cwd=str(folder)), base_url, example["api_key"], config, steps)
    write(folder, example["tests"])
    return float(passes(folder, list(example["tests"])))


def work_on(issue: str, environment: LocalEnvironment, url: str, key: str, config: str, steps: int) -> None:
    """Let mini-swe-agent work on an issue for at most this number of steps.

    `config` is a configuration of mini-swe-agent: a file beside this one, or one of its package.
    """
    beside = Path(__file__).with_name(config)
    settings = get_config_from_spec(str(beside) if beside.exists() else config)
    endpoint = {"api_base": url, "api_key": key, "max_retries": 0}
    settings["model"]["model_kwargs"] = settings["model"].get("model_kwargs", {}) | endpoint
    model = LitellmModel(model_name="openai/actor", cost_tracking="ignore_errors", **settings["model"])
    templates = {name: settings["agent"][name] for name in ("system_template", "instance_template")}
    try:
        DefaultAgent(model, environment, step_limit=steps, cost_limit=0, **templates).run(issue)
    except BadRequestError as error:  # no room is left in the row: the tests judge what is done
        print(error)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def passes(folder: Path, tests: list[str]) -> bool:
    """Return whether all test files, which are programs, end with exit status 0 in time."""
    for name in tests:
        try:
            ended = subprocess.run([sys.executable, name], cwd=folder, capture_output=True, timeout=TESTS_S)
        except subprocess.TimeoutExpired:
            return False
        if ended.returncode != 0:
            return False
    return True
