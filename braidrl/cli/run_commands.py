"""Commands about an existing run: `braid report`, `timeline`, `export` and `checkpoint check`."""

from pathlib import Path
from typing import Annotated

import typer

from braidrl.cli.arguments import RunFolder
from braidrl.errors import UserError


def report(run: RunFolder) -> None:
    """Write RUN/report.html: curves, and sample responses over time."""
    from braidrl.observe.report import write_report

    typer.echo(write_report(run))


def timeline(run: RunFolder) -> None:
    """Show busy and idle times of processes, in a table here and in RUN/timeline.html; RUN/timeline.json is for Perfetto."""
    from braidrl.observe.timeline import busy_lines, write_timeline

    page, chrome = write_timeline(run)
    for line in busy_lines(run):
        typer.echo(line)
    typer.echo(f"{page}\n{chrome}")


def export(
    run: RunFolder,
    folder: Annotated[Path, typer.Argument(help="A new folder for the Hugging Face model.")],
    role: Annotated[str | None, typer.Option(help="By default the actor, or the only role.")] = None,
) -> None:
    """Copy a role's model out of a run's latest checkpoint (or a checkpoint folder) as a Hugging Face directory."""
    from braidrl.runtimes.saving.export import export_model

    typer.echo(export_model(run, folder, role))


def check_checkpoints(run: RunFolder) -> None:
    """Check every file of a run's checkpoints against its checksum; the exit code is 1 if one is damaged."""
    from braidrl.runtimes.saving.checkpoints import checkpoint_damage
    from braidrl.runtimes.saving.folders import checkpoints_of

    troubles = {folder: checkpoint_damage(folder) for folder in checkpoints_of(run)}
    if not troubles:
        raise UserError(f"{run} has no checkpoint")
    for folder, trouble in troubles.items():
        typer.echo(f"{folder}: {trouble or 'whole'}")
    if any(troubles.values()):
        raise typer.Exit(1)


def verify(run: RunFolder) -> None:
    """Report the command's new name."""
    raise UserError(f"braid verify is called `braid checkpoint check {run}`")
