"""Whether a tracker that sends metrics to a server has a login, seen without importing its package."""

import netrc
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from braidrl.config import TrackerConfig


@dataclass(frozen=True)
class LoginPlace:
    """Where a tracker's package finds its login: variables that hold one, or a netrc file that `command` writes."""

    variables: tuple[str, ...]
    mode: str
    """The variable that takes the place of the setting `mode`."""
    local: tuple[str, ...]
    """Modes that send nothing."""
    server: str
    """The variable with the server's address,"""
    host: str
    """and its host where it is not set."""
    netrc: str
    command: str


LOGINS = {
    "wandb": LoginPlace(
        ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"), "WANDB_MODE", ("offline", "disabled", "dryrun"), "WANDB_BASE_URL",
        "api.wandb.ai", "~/.netrc", "wandb login",
    ),
}  # fmt: skip


def missing_login(tracker: TrackerConfig) -> str:
    """Return what is to be said of a tracker without a login; nothing where it has one, or needs none."""
    place = LOGINS.get(tracker.name)
    if place is None or (tracker.params.get("mode") or os.environ.get(place.mode)) in place.local:
        return ""
    if any(os.environ.get(variable) for variable in place.variables):
        return ""
    server = os.environ.get(place.server)
    host = urlsplit(server).hostname if server else place.host
    if kept_login(Path(os.environ.get("NETRC", place.netrc)).expanduser(), str(host)):
        return ""
    return (
        f"trackers={tracker.name}: there is no login for {host}; run `{place.command}`, set {place.variables[0]}, or write "
        f"{place.mode}={place.local[0]} to keep its files here"
    )


def kept_login(file: Path, host: str) -> bool:
    """Return whether a netrc file has a password for a host."""
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
