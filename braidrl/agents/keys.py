"""The API key of a run's endpoint."""

import ipaddress
import os
from contextlib import suppress

from braidrl.config import EnvironmentConfig
from braidrl.errors import UserError


def endpoint_key(settings: EnvironmentConfig) -> str | None:
    """Return the key of a run's endpoint, None without one.

    Raises UserError for a variable that is not set, and for a key-less address that other machines can reach.
    """
    name, host = settings.key_variable, settings.host
    key = None if name is None else os.environ.get(name)
    if name is not None and not key:
        raise UserError(
            f"rollout.environment.key_variable={name}: this variable is not set or empty; set it to the key"
        )
    is_here = host == "localhost"
    with suppress(ValueError):
        is_here = is_here or ipaddress.ip_address(host).is_loopback
    if not is_here and not key:
        raise UserError(
            f"rollout.environment.host={host} is reached by others, and there is no key; set a variable to one and "
            "name it in rollout.environment.key_variable"
        )
    return key
