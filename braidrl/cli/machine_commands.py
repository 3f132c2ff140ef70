"""Commands about machines: `braid plan` for future machines, `braid doctor` for this machine or a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from braidrl.cli.arguments import ConfigFile, Overrides, split_config
from braidrl.errors import UserError


def plan(
    config: ConfigFile = None,
    overrides: Overrides = None,
    devices: Annotated[
        str, typer.Option(help="NODESxDEVICESxKIND, as in 8x8xH100-80GB; a .yaml file; or cpu.")
    ] = "cpu",
    lengths: Annotated[
        str | None, typer.Option(help="Response lengths: a run folder, TOKENS, or MEDIAN:LONGEST.")
    ] = None,
    seconds: Annotated[
        list[str] | None, typer.Option(help="STAGE=SECONDS per iteration, for a stage without a cost model.")
    ] = None,
    rates: Annotated[Path | None, typer.Option(help="A file of rates, as written by --calibrate.")] = None,
    like: Annotated[
        str | None, typer.Option(help="Use the placement of deepspeed-chat, openrlhf, nemo-aligner or verl.")
    ] = None,
    max_staleness: Annotated[
        int | None, typer.Option(help="Consider streaming with a staleness of up to this many versions.")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds to search; then the best plan so far is used.")
    ] = None,
    overlay: Annotated[Path, typer.Option(help="File for the best plan.")] = Path("overlay.yaml"),
    html: Annotated[Path | None, typer.Option(help="Draw the best plan's predicted timeline into this file.")] = None,
    calibrate: Annotated[
        list[Path] | None, typer.Option(help="A run to fit rates to; they are saved to --rates.")
    ] = None,
) -> None:
    """Find the fastest placement, layouts and runtime for a configuration on given devices, without these devices."""
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
