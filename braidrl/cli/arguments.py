"""Arguments that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None, typer.Argument(help="A YAML configuration; optional if overrides set all that is needed.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Dotted key=value, as in trainer.steps=10, or a YAML file whose keys override the first."),
]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]


def split_config(config: Path | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """Separate the file from overrides: in `braid train flow=grpo model=...` the first argument is an override too."""
    if config is not None and "=" in str(config) and not config.exists():
        return None, [str(config), *(overrides or [])]
    return config, overrides or []
