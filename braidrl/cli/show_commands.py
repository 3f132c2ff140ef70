"""Commands that show flows, data, models and names: `braid flow`, `data`, `list`, `check`, `import-config`."""

from pathlib import Path
from typing import Annotated

import typer

from braidrl.cli.arguments import ConfigFile, Overrides, split_config


def flow(
    config: Annotated[str, typer.Argument(help="A recipe, a YAML flow, module:function, or a configuration file.")],
    overrides: Overrides = None,
    svg: Annotated[Path | None, typer.Option(help="Also write the text as a picture into this file.")] = None,
    yaml: Annotated[bool, typer.Option("--yaml", help="Print the flow's YAML form.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print the flow as a Mermaid flowchart.")] = False,
) -> None:
    """Show a flow: its stages, the columns that each reads and writes, and stages that may run at the same time."""
    from braidrl.flow import drawing
    from braidrl.flow.yaml_form import to_yaml
    from braidrl.runtimes.prepare.run_flow import flow_by_name

    shown = flow_by_name(config, overrides or [])
    typer.echo(to_yaml(shown) if yaml else drawing.mermaid(shown) if mermaid else drawing.text(shown))
    if svg is not None:
        svg.write_text(drawing.svg(shown), encoding="utf-8")
        typer.echo(f"drawn in {svg}")


def data(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Show the data of a configuration: counts, lengths, samples as the model sees them, and skipped records with reasons."""
    from braidrl.cli.show_data import show_data
    from braidrl.config import load_config

    show_data(load_config(*split_config(config, overrides), flow="grpo"))


def import_config(
    config: Annotated[
        Path, typer.Argument(help="A YAML file of verl: its whole configuration, or the keys that are set.")
    ],
    target: Annotated[Path, typer.Argument(help="The Braid configuration to write.")] = Path("braid.yaml"),
) -> None:
    """Convert a verl configuration to Braid, and list keys without a counterpart."""
    from braidrl.cli.import_config import write_imported

    for line in write_imported(config, target):
        typer.echo(line)


def list_kind(
    kind: Annotated[
        str | None, typer.Argument(help="losses, advantages, rewards, engines...; by default all kinds.")
    ] = None,
) -> None:
    """List the names that a flow or a configuration can use, with settings and sources."""
    from braidrl.cli.catalogue import KINDS, catalogue, lines

    if kind is None:
        for known in KINDS:
            typer.echo(f"{known}: {', '.join(listed.name for listed in catalogue(known))}")
        return
    for listed in catalogue(kind):
        for line in lines(listed):
            typer.echo(line)


def check(
    model: Annotated[
        str, typer.Argument(help="A model's folder, its config.json, or a hub id in this machine's cache.")
    ],
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Also start two ranks for each layout, and compare them.")
    ] = False,
) -> None:
    """Check on a tiny model of the same structure that a model trains correctly; the exit code is 1 if it may not train."""
    from braidrl.cli.check_model import check as check_model

    if not check_model(model, layouts, typer.echo):
        raise typer.Exit(1)
