"""What a verifier of Braid's needs beside its settings, said before anything runs."""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from braidrl.config import RewardConfig
from braidrl.errors import UserError
from braidrl.sandbox.sandbox import namespaces_allowed
from braidrl.sandbox.untrusted import check_bubblewrap


def check_requirements(name: str, params: Mapping[str, Any], settings: RewardConfig) -> None:
    """Raise UserError where a verifier of that name cannot be called. Nothing is imported.

    Args:
        name: As in the configuration.
        params: Its own settings.
        settings: Those of all verifiers.
    """
    if name == "code":
        check_strict(settings)
    if name in ("judge", "remote"):
        check_service(name, params.get("key"), settings)


def check_strict(settings: RewardConfig) -> None:
    """Raise UserError where programs of a model would not run in the strict sandbox."""
    if settings.sandbox != "bubblewrap" or not settings.processes:
        raise UserError(
            "reward.verify=code runs what a model wrote, and only in the strict sandbox; write reward.sandbox=bubblewrap "
            "and at least reward.processes=1"
        )
    check_bubblewrap("reward", settings)
    if not namespaces_allowed():
        raise UserError(
            "reward.verify=code: this system gives a process no namespaces of its own, without which there is no strict sandbox; "
            "allow them (sysctl user.max_user_namespaces), or take another verifier"
        )


def check_service(name: str, key: str | None, settings: RewardConfig) -> None:
    """Raise UserError where a service could not be asked; `key` names the variable that holds its key."""
    told = f"reward.verify={name}"
    if importlib.util.find_spec("aiohttp") is None:
        raise UserError(f"{told} needs aiohttp; install it with `pip install 'braidrl[endpoint]'`")
    if key and key not in os.environ:
        raise UserError(f"{told}: its key is to be in the variable {key}, which is not set; write export {key}=...")
    if key and key not in settings.environment:
        raise UserError(f"{told}: its key is in {key}, which verifiers are not given; write reward.environment=[{key}]")
