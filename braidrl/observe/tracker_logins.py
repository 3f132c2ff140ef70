"""Whether a tracker that sends metrics to a server has a login, or its server answers, seen without importing its package."""

import base64
import netrc
import os
import ssl
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from braidrl.config import TrackerConfig

ANSWER_LIMIT_S = 5.0
"""How long a tracker's server may take to answer before a run begins."""
REFUSED = (401, 403)


@dataclass(frozen=True)
class LoginPlace:
    """Where a tracker's package finds its login: variables that hold one, or a file that `command` writes."""

    variables: tuple[str, ...]
    mode: str
    """The variable that takes the place of the setting `mode`."""
    local: tuple[str, ...]
    """Modes that send nothing."""
    server: str
    """The variable with the server's address,"""
    host: str
    """and its host where it is not set."""
    netrc: tuple[str, ...]
    """Files with a password for the host; variables in them are replaced."""
    command: str
    settings: tuple[str, ...] = ()
    """Files of settings that may hold an `api_key`."""


SWANLAB_FILES = tuple(
    f"{place}.{ending}"
    for place in ("swanlab", ".swanlab/config", "$SWANLAB_ROOT/config", "$SWANLAB_SAVE_DIR/config", "~/.swanlab/config")
    for ending in ("yaml", "yml")
)
LOGINS = {
    "wandb": LoginPlace(
        ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"), "WANDB_MODE", ("offline", "disabled", "dryrun"), "WANDB_BASE_URL",
        "api.wandb.ai", ("$NETRC", "~/.netrc"), "wandb login",
    ),
    "swanlab": LoginPlace(
        ("SWANLAB_API_KEY",), "SWANLAB_MODE", ("offline", "local", "disabled"), "SWANLAB_API_HOST", "api.swanlab.cn",
        (".swanlab/.netrc", "$SWANLAB_ROOT/.netrc", "$SWANLAB_SAVE_DIR/.netrc", "~/.swanlab/.netrc"), "swanlab login",
        (*SWANLAB_FILES, ".env", "$SWANLAB_SECRETS_DIR/swanlab_api_key"),
    ),
}  # fmt: skip


def missing_login(tracker: TrackerConfig) -> str:
    """Return what is to be said of a tracker without a login, or a server; nothing where it has both, or needs none."""
    if tracker.name == "mlflow":
        return silent_server(str(tracker.params.get("uri") or os.environ.get("MLFLOW_TRACKING_URI", "")))
    place = LOGINS.get(tracker.name)
    if place is None or (tracker.params.get("mode") or os.environ.get(place.mode)) in place.local:
        return ""
    if any(os.environ.get(variable) for variable in place.variables):
        return ""
    server = os.environ.get(place.server)
    host = str(urlsplit(server).hostname) if server else place.host
    if any(kept_login(file, host) for file in files(place.netrc)):
        return ""
    if any("api_key" in file.read_text().lower() or file.name == "swanlab_api_key" for file in files(place.settings)):
        return ""
    return (
        f"trackers={tracker.name}: there is no login for {host}; run `{place.command}`, set {place.variables[0]}, or write "
        f"{place.mode}={place.local[0]} to keep its files here"
    )


def files(names: tuple[str, ...]) -> list[Path]:
    """Return the files that are there, with variables and ~ replaced."""
    found = [Path(os.path.expandvars(name)).expanduser() for name in names]
    return [file for file in found if file.is_file() and os.access(file, os.R_OK)]


def kept_login(file: Path, host: str) -> bool:
    """Return whether a netrc file has a password for a host, under its name or its address."""
    try:
        known = netrc.netrc(file).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any((urlsplit(name).hostname or name) in (host, "default") for name in known)


def silent_server(uri: str) -> str:
    """Return what is to be said of an MLflow server that does not answer, or not to this user; nothing of a file or database."""
    if not uri.startswith(("http://", "https://")):
        return ""
    asked = f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/get?experiment_id=0"
    try:
        urlopen(Request(asked, headers=mlflow_login()), timeout=ANSWER_LIMIT_S).close()
    except HTTPError as error:
        if error.code not in REFUSED or has_other_login(uri):
            return ""
        return (
            f"trackers=mlflow: {uri} refuses this login ({error.code}); set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN"
        )
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # MLflow may be told to accept a certificate that this does not know
            return ""
        return (
            f"trackers=mlflow: nothing answers at {uri} ({reason}); start `mlflow server` there, or write "
            "MLFLOW_TRACKING_URI=sqlite:///mlflow.db to keep its runs here"
        )
    return ""


def mlflow_login() -> dict[str, str]:
    """Return the header by which MLflow's variables say who asks."""
    name, password, token = (os.environ.get(f"MLFLOW_TRACKING_{each}") for each in ("USERNAME", "PASSWORD", "TOKEN"))
    if name and password:
        return {"Authorization": f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"}
    return {"Authorization": f"Bearer {token}"} if token else {}


def has_other_login(uri: str) -> bool:
    """Return whether MLflow may have a login that is not tried here: a plugin's, its own file's or netrc's."""
    variables = ("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4")
    kept = any(kept_login(file, str(urlsplit(uri).hostname)) for file in files(("$NETRC", "~/.netrc")))
    return kept or bool(files(("~/.mlflow/credentials",))) or any(os.environ.get(name) for name in variables)
