"""Download of the hub models and data in a configuration to this machine's cache, before anything else."""

from pathlib import Path
from typing import Any

from braidrl.config import Config, DataConfig, SourceConfig
from braidrl.data.conversions import KNOWN
from braidrl.errors import UserError
from braidrl.hub import fetch, is_hub_name
from braidrl.runtimes.prepare.run_flow import with_own_samples


def with_fetched(config: Config, whole: bool = True) -> Config:
    """Return the configuration with local folders in place of hub names, downloaded if missing.

    A flow that trains on given responses has its own number of samples.

    A folder belongs to one commit, so a run resumes with the same files whatever the name points to later.

    Args:
        config: The configuration.
        whole: False downloads neither weights nor data, and data keep their names.

    Raises:
        UserError: A download failed.
    """
    config = with_own_samples(config)
    roles = {
        role: own.model_copy(update={"model": model_here(own.model, f"roles.{role}.model", whole)})
        for role, own in config.roles.items()
        if own.model is not None
    }
    model = model_here(config.model, "model", whole)
    data = with_data_here(config.data) if whole else config.data
    return config.model_copy(update={"model": model, "roles": {**config.roles, **roles}, "data": data})


def model_here(name: Path, key: str, whole: bool) -> Path:
    """Return the local folder of a model, without its weights unless `whole`."""
    if name.suffix == ".gguf":
        raise UserError(
            f"{key}: {name} is a GGUF file; make a model directory of it by `python examples/smollm2/fetch.py --gguf {name} FOLDER`"
        )
    return fetch(name, key, "model" if whole else "model without weights") if is_hub_name(name) else name


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
    known = KNOWN.get(str(source.path).partition("@")[0]) if takes_records_as_they_are(source) else None
    chosen: dict[str, Any] = {"path": fetch(source.path, key, "dataset")}
    if known is not None:
        chosen |= {"convert": known.convert, "subset": source.subset or known.subset}
        chosen["split"] = source.split or (known.split if key == "data.train" else None)
    return source.model_copy(update=chosen)


def takes_records_as_they_are(source: SourceConfig) -> bool:
    """Return True if the configuration does not map fields of a record to an example."""
    fields = [name for name in SourceConfig.model_fields if name.endswith("_field")]
    usual = all(getattr(source, name) == SourceConfig.model_fields[name].default for name in fields)
    return source.convert is None and usual
