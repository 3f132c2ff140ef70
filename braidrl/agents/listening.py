"""Where an agent's endpoint listens, and who may speak to it."""

import ipaddress
import os
from contextlib import suppress

from braidrl.config import EnvironmentConfig
from braidrl.errors import UserError


def key_of(settings: EnvironmentConfig) -> str | None:
    """Return the key of a run's endpoint, None without one. Raises UserError as `check_listening`, or for a variable that is not set."""
    name = settings.key_variable
    key = None if name is None else os.environ.get(name)
    if name is not None and not key:
        raise UserError(
            f"rollout.environment.key_variable={name}: this variable is not set or empty; set it to the key"
        )
    check_listening(settings.host, key)
    return key


def check_listening(host: str, key: str | None) -> None:
    """Raise UserError for an address that others reach, where no key says who may."""
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost" and not key:
        raise UserError(
            f"rollout.environment.host={host} is reached by others, and there is no key; set a variable to one and name it in "
            "rollout.environment.key_variable"
        )
