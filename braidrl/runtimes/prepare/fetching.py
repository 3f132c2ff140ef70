"""Download of the hub models and data in a configuration to this machine's cache, before anything else."""

from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants, errors, snapshot_download

from braidrl.config import Config, DataConfig, SourceConfig
from braidrl.config.paths import NAME, is_hub_name
from braidrl.data.conversions import KNOWN
from braidrl.errors import UserError, first_line
from braidrl.runtimes.prepare.run_flow import with_samples_of_data


def with_fetched(config: Config, with_weights: bool = True) -> Config:
    """Return the configuration with local folders in place of hub names, downloaded if missing. Raises UserError if
    that fails.

    A folder belongs to one commit, so that a run resumes with the same files even if the name later refers to another
    commit. Without `with_weights` neither weights nor data are downloaded, and data keep their names.
    """
    config = with_samples_of_data(config)
    roles = {
        role: role_config.model_copy(
            update={"model": model_here(role_config.model, f"roles.{role}.model", with_weights)}
        )
        for role, role_config in config.roles.items()
        if role_config.model is not None
    }
    model = model_here(config.model, "model", with_weights)
    data = with_data_here(config.data) if with_weights else config.data
    return config.model_copy(update={"model": model, "roles": {**config.roles, **roles}, "data": data})


def model_here(name: Path, key: str, with_weights: bool) -> Path:
    """Return the local folder of a model, `with_weights` or without."""
    if name.suffix == ".gguf":
        raise UserError(f"{key}: {name} is a GGUF file; run `python examples/smollm2/fetch.py --gguf {name} FOLDER`")
    return fetch(name, key, "model" if with_weights else "model without weights") if is_hub_name(name) else name


def with_data_here(data: DataConfig) -> DataConfig:
    """Return the data section with all sources on this machine."""
    sources = {
        "train": [source_here(source, "data.train") for source in data.train],
        "eval": {name: source_here(source, f"data.eval.{name}") for name, source in data.eval.items()},
        "ptx": source_here(data.ptx, "data.ptx") if data.ptx is not None else None,
    }
    return data.model_copy(update=sources)


def source_here(source: SourceConfig, key: str) -> SourceConfig:
    """Return a source whose data is a local file or folder."""
    if not is_hub_name(source.path):
        return source
    # A built-in conversion is for records whose fields the configuration does not map.
    fields = [name for name in SourceConfig.model_fields if name.endswith("_field")]
    usual = all(getattr(source, name) == SourceConfig.model_fields[name].default for name in fields)
    preset = KNOWN.get(str(source.path).partition("@")[0]) if usual and source.convert is None else None
    chosen: dict[str, Any] = {"path": fetch(source.path, key, "dataset")}
    if preset is not None:
        chosen |= {"convert": preset.convert, "subset": source.subset or preset.subset}
        chosen["split"] = source.split or (preset.split if key == "data.train" else None)
    return source.model_copy(update=chosen)


HubKind = Literal["model", "model without weights", "dataset"]
SMALL_FILES, WEIGHTS, OLD_WEIGHTS = ["*.json", "*.model", "*.txt", "*.jinja"], "*.safetensors", "pytorch_model*.bin"


def fetch(name: Path, key: str, kind: HubKind = "model") -> Path:
    """Return the cache folder of a repository, `ORG/NAME` or `ORG/NAME@revision`; missing files are downloaded.

    For a model only weights, configuration and tokenizer are downloaded. Raises UserError, which names `key`, if that
    fails.
    """
    match = NAME.fullmatch(str(name))
    assert match is not None, name
    repository, revision = match["repository"], match["revision"]
    try:
        if kind == "dataset":
            return Path(snapshot_download(repository, repo_type=kind, revision=revision))
        weights = [WEIGHTS] if kind == "model" else []
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=[*SMALL_FILES, *weights]))
        if weights and not any(folder.glob(WEIGHTS)):
            snapshot_download(repository, revision=revision, allow_patterns=[OLD_WEIGHTS])
        return folder
    except (
        errors.HTTPError,
        errors.HfHubHTTPError,
        errors.HFValidationError,
        errors.LocalEntryNotFoundError,
        errors.IncompleteSnapshotError,
    ) as error:
        raise UserError(f"{key}: {refusal(error, repository, revision, kind)}") from error


def refusal(error: Exception, repository: str, revision: str | None, kind: HubKind) -> str:
    """Build a message of one line with the error and a remedy."""
    hub, what = constants.ENDPOINT, "data set" if kind == "dataset" else "model"
    match error:
        case errors.GatedRepoError():
            page = f"{hub}/{'datasets/' if kind == 'dataset' else ''}{repository}"
            return f"{repository} is given to those who accept its conditions; accept them at {page}, then set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return (
                f"there is no file or folder {repository} here, and {hub} shows no {what} of this name; "
                "correct it, or set HF_TOKEN where it is private"
            )
        case errors.RevisionNotFoundError():
            return f"{repository} has no revision {revision!r} at {hub}; write a branch, a tag or a commit after the @"
        case errors.HfHubHTTPError() if error.response is not None and error.response.status_code == 401:
            return f"{hub} does not accept the token in HF_TOKEN or of `hf auth login`; set another, or none"
        case errors.LocalEntryNotFoundError() | errors.IncompleteSnapshotError():
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} cannot be reached"
            command = f"hf download {repository}" + (" --repo-type dataset" if kind == "dataset" else "")
            command += f" --revision {revision}" if revision else ""
            return (
                f"there is no file or folder {repository} here, the cache {constants.HF_HUB_CACHE} does not have all "
                f"of it, and {why}; where there is a network, `{command}` fills a cache, which HF_HOME names here"
            )
    return f"{repository} cannot be fetched from {hub}: {first_line(error)}"
