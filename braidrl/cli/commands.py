"""The `braid` command: a thin face over the runtimes. A user's mistake ends in one line; `--debug` shows the traceback."""

import gc
import os
import platform
import sys
from pathlib import Path
from typing import Annotated

import typer

from braidrl import __version__
from braidrl.errors import UserError, WorkerError, no_room
from braidrl.importing import OBJECTS_BETWEEN_COLLECTIONS, version_of

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip

ConfigFile = Annotated[
    Path | None, typer.Argument(help="A YAML configuration; may be left out if overrides say it all.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Dotted key=value, as in trainer.steps=10, or a YAML file that lies over the first."),
]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2


def show_version(asked: bool) -> None:
    """Print the versions that a report of a fault needs, and end."""
    if asked:
        packages = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers"))
        typer.echo(f"braid {__version__}, {packages}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def before_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print versions, and end.")
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models."""


@app.command()
def train(
    config: ConfigFile = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with this run from its latest checkpoint; key=value changes what may change."),
    ] = None,
    newest_whole: Annotated[
        bool,
        typer.Option(
            "--newest-whole", help="Where the latest checkpoint is damaged, go on from the newest that is not."
        ),
    ] = False,
    replay: Annotated[Path | None, typer.Option(help="Train on the rollouts that this run recorded.")] = None,
    rollout_only: Annotated[bool, typer.Option("--rollout-only", help="Record rollouts; train nothing.")] = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the memory it would take, and end.")
    ] = False,
) -> None:
    """Train by a flow. Prints the run folder first."""
    from braidrl.config import load_config
    from braidrl.runtimes.run import train as run_training
    from braidrl.runtimes.saving.folders import run_config
    from braidrl.runtimes.start import start_fork_server

    if resume is not None:
        file, changed = split_config(config, overrides)
        if file is not None:
            raise UserError(
                f"--resume takes its configuration from the run folder; write what changes as key=value, not {file}"
            )
        settings = run_config(resume, changed)
    else:
        settings = load_config(*split_config(config, overrides))
    if dry:
        from braidrl.cli.dry_run import dry_run

        dry_run(settings)
        return
    if newest_whole and resume is None:
        raise UserError("--newest-whole is for --resume; a new run has no checkpoint")
    start_fork_server(settings)
    run_training(settings, resume=resume, newest_whole=newest_whole, replay=replay, rollout_only=rollout_only)


@app.command(name="eval")
def evaluate(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Evaluate a model, or a checkpoint given as model=, on the sets under data.eval."""
    from braidrl.config import load_config
    from braidrl.runtimes.evaluation import evaluate_model
    from braidrl.runtimes.spmd.launch import is_reporting_rank
    from braidrl.runtimes.start import start_fork_server

    # Whatever trained the model: any flow that generates and verifies evaluates it.
    settings = load_config(*split_config(config, overrides), flow="grpo")
    start_fork_server(settings)
    metrics = evaluate_model(settings)
    for name, value in metrics.items() if is_reporting_rank() else ():
        typer.echo(f"{name}\t{value:.4f}")


@app.command()
def flow(
    config: Annotated[str, typer.Argument(help="A recipe, a YAML flow, module:function, or a configuration file.")],
    overrides: Overrides = None,
    svg: Annotated[Path | None, typer.Option(help="Also write the text as a picture into this file.")] = None,
    yaml: Annotated[bool, typer.Option("--yaml", help="Print the flow's YAML form.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print the flow as a Mermaid flowchart.")] = False,
) -> None:
    """Show a flow: its stages, what each reads and writes, and what may run at the same time."""
    from braidrl.flow import drawing
    from braidrl.flow.yaml_form import to_yaml
    from braidrl.runtimes.prepare.flow import flow_by_name

    shown = flow_by_name(config, overrides or [])
    typer.echo(to_yaml(shown) if yaml else drawing.mermaid(shown) if mermaid else drawing.text(shown))
    if svg is not None:
        svg.write_text(drawing.svg(shown))
        typer.echo(f"drawn in {svg}")


@app.command()
def data(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Show what a configuration reads: counts, lengths, samples as the model sees them, and what is left out and why."""
    from braidrl.cli.show_data import show_data
    from braidrl.config import load_config

    show_data(load_config(*split_config(config, overrides), flow="grpo"))


@app.command()
def plan(
    config: ConfigFile = None,
    overrides: Overrides = None,
    devices: Annotated[
        str, typer.Option(help="NODESxDEVICESxKIND, as in 8x8xH100-80GB; a .yaml file; or cpu.")
    ] = "cpu",
    lengths: Annotated[str | None, typer.Option(help="Of responses: a run folder, TOKENS, or MEDIAN:LONGEST.")] = None,
    seconds: Annotated[
        list[str] | None, typer.Option(help="STAGE=SECONDS per iteration, of a stage that cannot be priced.")
    ] = None,
    rates: Annotated[Path | None, typer.Option(help="A file of rates, as --calibrate writes.")] = None,
    like: Annotated[
        str | None, typer.Option(help="deepspeed-chat, openrlhf, nemo-aligner or verl: their placement.")
    ] = None,
    max_staleness: Annotated[
        int | None, typer.Option(help="Consider streaming with rows that lag behind by so many versions.")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds after which the best plan so far is taken.")] = None,
    overlay: Annotated[Path, typer.Option(help="Where the best plan is written.")] = Path("overlay.yaml"),
    html: Annotated[Path | None, typer.Option(help="Draw the best plan's predicted timeline into this file.")] = None,
    calibrate: Annotated[list[Path] | None, typer.Option(help="A run to fit rates to; they go to --rates.")] = None,
) -> None:
    """Find the quickest placement, layouts and runtime for a configuration on some devices, before they are there."""
    from rich.console import Console

    from braidrl.cli.plan_command import Wanted, calibrated
    from braidrl.cli.plan_command import plan as find_plans
    from braidrl.config import load_config

    if calibrate:
        file = rates or Path("rates.yaml")
        calibrated(calibrate, devices, file)
        typer.echo(f"rates fitted to {len(calibrate)} runs are in {file}; use them with --rates {file}")
        return
    settings = load_config(*split_config(config, overrides))
    wanted = Wanted(devices, lengths, seconds or (), rates, like, max_staleness, time_limit)
    find_plans(settings, wanted, overlay, html, Console())


@app.command(name="list")
def list_kind(
    kind: Annotated[
        str | None, typer.Argument(help="losses, advantages, rewards, engines...; left out, all kinds.")
    ] = None,
) -> None:
    """Show what a flow or a configuration can name, with settings and sources."""
    from braidrl.cli.catalogue import KINDS, catalogue, lines

    if kind is None:
        for known in KINDS:
            typer.echo(f"{known}: {', '.join(listed.name for listed in catalogue(known))}")
        return
    for listed in catalogue(kind):
        for line in lines(listed):
            typer.echo(line)


@app.command()
def report(run: RunFolder) -> None:
    """Write RUN/report.html: curves, and sample responses over time."""
    from braidrl.observe.report import write_report

    typer.echo(write_report(run))


@app.command()
def timeline(run: RunFolder) -> None:
    """Show who was busy and who waited, as a table here and in RUN/timeline.html; RUN/timeline.json is for Perfetto."""
    from braidrl.observe.timeline import busy_lines, write_timeline

    page, chrome = write_timeline(run)
    for line in busy_lines(run):
        typer.echo(line)
    typer.echo(f"{page}\n{chrome}")


@app.command()
def export(
    run: RunFolder,
    folder: Annotated[Path, typer.Argument(help="A new folder for the Hugging Face model.")],
    role: str = "actor",
) -> None:
    """Copy a role's model out of a run's latest checkpoint (or a checkpoint folder) as a Hugging Face directory."""
    from braidrl.runtimes.saving.export import export_model

    typer.echo(export_model(run, folder, role))


@app.command()
def verify(run: RunFolder) -> None:
    """Check every file of a run's checkpoints against their checksums; ends with 1 where one is damaged."""
    from braidrl.runtimes.saving.checkpoints import checkpoint_damage
    from braidrl.runtimes.saving.folders import checkpoints_of

    troubles = {folder: checkpoint_damage(folder) for folder in checkpoints_of(run)}
    if not troubles:
        raise UserError(f"{run} has no checkpoint")
    for folder, trouble in troubles.items():
        typer.echo(f"{folder}: {trouble or 'whole'}")
    if any(troubles.values()):
        raise typer.Exit(1)


@app.command()
def doctor(
    config: ConfigFile = None,
    overrides: Overrides = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the nodes of a Ray cluster, with the paths of a configuration.")
    ] = False,
) -> None:
    """Check this machine: versions, devices, memory, and a training step on a tiny model. With --cluster, every node of a Ray cluster."""
    from braidrl.cli.cluster_doctor import examine_cluster
    from braidrl.cli.doctor import examine
    from braidrl.config import load_config

    if not cluster and (config or overrides):
        raise UserError(
            "braid doctor looks at this machine and takes no configuration; write --cluster for a cluster's nodes"
        )
    named = load_config(*split_config(config, overrides), flow="grpo") if config or overrides else None
    if not (examine_cluster(named, typer.echo) if cluster else examine(typer.echo)):
        raise typer.Exit(1)


def split_config(config: Path | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """Tell a file from overrides: `braid train flow=grpo model=...` has no file, and its first argument is an override too."""
    if config is not None and "=" in str(config) and not config.exists():
        return None, [str(config), *(overrides or [])]
    return config, overrides or []


def main() -> None:
    """Run the command; a user's mistake ends in one line and an exit code, and Ctrl-C in 130."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1 or os.environ.get("BRAID_DEBUG") == "1"
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    try:
        app(arguments, standalone_mode=True)
    except UserError as error:
        if debug:
            raise
        typer.echo(f"braid: {error}", err=True)
        sys.exit(EXIT_USER_ERROR)
    except OSError as error:
        if debug or not no_room(error):
            raise
        typer.echo(f"braid: {no_room(error)}", err=True)
        sys.exit(EXIT_USER_ERROR)
    except WorkerError as error:
        typer.echo(f"braid: {error}", err=True)
        sys.exit(EXIT_FAILURE)
