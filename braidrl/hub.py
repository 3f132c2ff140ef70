"""Download of models and data sets from a hub by name: `ORG/NAME`, or `ORG/NAME@revision` for a branch, a tag or a commit.

ORG/NAME@revision ──huggingface_hub──▶ cache (HF_HOME), whole files of one commit ──▶ the folder of that commit

huggingface_hub provides everything: the cache, tokens (HF_TOKEN, `hf auth login`), mirrors (HF_ENDPOINT), and HF_HUB_OFFLINE=1, which uses
only the cache. Cached files are also found without a network.
"""

import re
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from braidrl.errors import UserError, first_line

HubKind = Literal["model", "model without weights", "dataset"]
NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
SMALL_FILES, WEIGHTS, OLD_WEIGHTS = ["*.json", "*.model", "*.txt", "*.jinja"], "*.safetensors", "pytorch_model*.bin"
DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".txt", ".gz", ".zst")


def is_hub_name(name: Path) -> bool:
    """Return True for a text in the form of a hub's name that is not a local file or folder."""
    return NAME.fullmatch(str(name)) is not None and name.suffix not in DATA_FILES and not name.exists()


def fetch(name: Path, key: str, kind: HubKind = "model") -> Path:
    """Return the cache folder of a repository; missing files are downloaded.

    Args:
        name: `ORG/NAME` or `ORG/NAME@revision`.
        key: The configuration's key, for messages.
        kind: For a model only weights, configuration and tokenizer are downloaded, for a data set all files.

    Raises:
        UserError: The repository does not exist or access is denied, or the hub is unreachable and the cache is incomplete.
    """
    found = NAME.fullmatch(str(name))
    assert found is not None, name
    repository, revision = found["repository"], found["revision"]
    try:
        if kind == "dataset":
            return Path(snapshot_download(repository, repo_type=kind, revision=revision))
        weights = [WEIGHTS] if kind == "model" else []
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=[*SMALL_FILES, *weights]))
        if weights and not any(folder.glob(WEIGHTS)):
            snapshot_download(repository, revision=revision, allow_patterns=[OLD_WEIGHTS])
        return folder
    except (HTTPError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, IncompleteSnapshotError) as error:
        raise UserError(f"{key}: {refusal(error, repository, revision, kind)}") from error


def refusal(error: Exception, repository: str, revision: str | None, kind: HubKind) -> str:
    """Build a message of one line with the error and a remedy."""
    hub, what = constants.ENDPOINT, "data set" if kind == "dataset" else "model"
    match error:
        case GatedRepoError():
            page = f"{hub}/{'datasets/' if kind == 'dataset' else ''}{repository}"
            return f"{repository} is given to those who accept its conditions; accept them at {page}, then set HF_TOKEN"
        case RepositoryNotFoundError():
            return (
                f"there is no file or folder {repository} here, and {hub} shows no {what} of this name; "
                "correct it, or set HF_TOKEN where it is private"
            )
        case RevisionNotFoundError():
            return f"{repository} has no revision {revision!r} at {hub}; write a branch, a tag or a commit after the @"
        case HfHubHTTPError() if error.response is not None and error.response.status_code == 401:
            return f"{hub} does not accept the token in HF_TOKEN or of `hf auth login`; set another, or none"
        case LocalEntryNotFoundError() | IncompleteSnapshotError():
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} cannot be reached"
            command = f"hf download {repository}" + (" --repo-type dataset" if kind == "dataset" else "")
            command += f" --revision {revision}" if revision else ""
            return (
                f"there is no file or folder {repository} here, the cache {constants.HF_HUB_CACHE} does not have all of it, and {why}; "
                f"where there is a network, `{command}` fills a cache, which HF_HOME names here"
            )
    return f"{repository} cannot be fetched from {hub}: {first_line(error)}"
