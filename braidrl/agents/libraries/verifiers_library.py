"""Environments of the package `verifiers`: each has its own loop, and calls the endpoint as an agent does.

verifiers:NAME       an environment that is installed        verifiers:file.py      a file of yours with `load_environment`

A row plays the example of the environment's own data with its group's index; the environment's rubric gives the score.
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from braidrl.errors import UserError
from braidrl.importing import import_function

KEY_VARIABLE = "BRAID_ENDPOINT_KEY"
"""The variable of the endpoint's key for its clients, in the trajectory's process."""


def agent(name: str, settings: Mapping[str, Any]) -> Callable[[str, dict[str, Any]], Awaitable[float]]:
    """Return a function that plays a row against the endpoint, given an environment's name or file, and arguments of its
    `load_environment`. Raises UserError for an unsupported version of the package.
    """
    os.environ.setdefault("VF_LOG_LEVEL", "ERROR")
    import datasets
    import verifiers

    datasets.disable_progress_bars()
    if not hasattr(verifiers, "load_environment"):
        raise UserError(
            f"environment verifiers:{name}: verifiers {verifiers.__version__} has no load_environment; install 'verifiers>=0.1.14,<0.4'"
        )
    if name.endswith(".py"):
        environment = import_function(f"{name}:load_environment")(**settings)
    else:
        environment = verifiers.load_environment(name, **settings)
    examples = environment.get_dataset()

    async def play(url: str, example: dict[str, Any]) -> float:
        os.environ[KEY_VARIABLE] = example["api_key"]
        client = verifiers.types.ClientConfig(api_key_var=KEY_VARIABLE, api_base_url=url, max_retries=0)
        chosen = dict(examples[example["group"] % len(examples)])
        done = await environment.run_rollout(chosen, client, "actor", {})
        if done.get("error"):
            raise RuntimeError(f"its rollout failed: {done['error']}"[:600])
        return float(done["reward"])

    return play
