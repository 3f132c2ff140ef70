"""The `braid` command: its subcommands and exit codes. A user error is a message of one line; `--debug` adds the
traceback.

Each other module of this package does the work of one subcommand, which imports it after reading the configuration: a
wrong key is reported before torch is loaded.
"""

import atexit
import gc
import io
import os
import platform
import resource
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from braidrl import __version__
from braidrl.cluster.process import sleep_at_barriers
from braidrl.errors import (
    CollectedErrors,
    FailedStep,
    Problems,
    UserError,
    WorkerError,
    limit_reached,
    no_room,
    printable,
)
from braidrl.importing import OBJECTS_BETWEEN_COLLECTIONS, version_of

EXIT_FAILURE, EXIT_USER_ERROR = 1, 2
LEAST = {
    resource.RLIMIT_AS: (2 << 30, 1 << 30, "GiB of address space (ulimit -v)"),
    resource.RLIMIT_NOFILE: (128, 1, "open files (ulimit -n)"),
}
"""The least value, the unit and the name of each limit: below it libraries wait without end or fail without a word."""
WRONG_PATH = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.yaml] [KEY=VALUE]...",
        help=(
            "A configuration, if needed; then dotted keys, as in trainer.steps=10, or YAML files whose keys override "
            "the first."
        ),
    ),
]
RunFolder = Annotated[Path, typer.Argument(file_okay=False, help="A run folder.")]


def split(settings: list[str] | None) -> tuple[Path | None, list[str]]:
    """Separate the file from overrides: in `braid train flow=grpo model=...` the first argument is an override too."""
    first, *others = settings or [""]
    is_file = first and ("=" not in first or Path(first).exists())
    return (Path(first), others) if is_file else (None, settings or [])


def before_commands(
    version: Annotated[bool, typer.Option("--version", help="Print versions for a bug report, and exit.")] = False,
) -> None:
    """Reinforcement-learning post-training of language models."""
    if version:
        packages = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers"))
        say(f"braid {__version__}, {packages}, Python {platform.python_version()}")
        raise typer.Exit


app = typer.Typer(
    callback=before_commands,
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
checkpoint = typer.Typer(no_args_is_help=True, help="A run's checkpoints.")
app.add_typer(checkpoint, name="checkpoint")


@app.command()
def train(
    settings: Settings = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume this run; key=value changes keys that may change.")
    ] = None,
    newest_whole: Annotated[
        bool, typer.Option("--newest-whole", help="Resume from the newest undamaged checkpoint.")
    ] = False,
    replay: Annotated[Path | None, typer.Option(help="Train on the rollouts that this run recorded.")] = None,
    rollout_only: Annotated[bool, typer.Option("--rollout-only", help="Record rollouts; train nothing.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the memory needed, and exit.")] = False,
    devices: Annotated[
        str | None, typer.Option(help="With --dry-run: the devices of the machine that will run it, as in braid plan.")
    ] = None,
) -> None:
    """Train a flow. The first line of output is the run folder."""
    from braidrl.cluster.device_kinds import read_cluster
    from braidrl.config import load_config

    file, changed = split(settings)
    if newest_whole and resume is None:
        raise UserError("--newest-whole is for --resume; a new run has no checkpoint")
    if devices is not None and not dry:
        raise UserError("--devices is for --dry-run; a run takes the devices that it finds")
    if resume is None:
        config = load_config(file, changed, every=dry)
    elif file is not None:
        raise UserError(f"--resume takes its configuration from the run folder; write key=value, not {file}")
    else:
        from braidrl.runtimes.saving.folders import run_config

        config = run_config(resume, changed)
    from braidrl.runtimes.prepare.first_checks import check_first

    if dry:
        if devices is not None:
            read_cluster(devices)
        errors = CollectedErrors()
        check_first(config, check=errors)
        errors.raise_any()
        from braidrl.cli.dry_run import dry_run

        dry_run(config, devices=devices)
        return
    if resume is None:
        check_first(config, trained=replay is None)
    from braidrl.runtimes.restarts import train as run_training
    from braidrl.runtimes.start import start_fork_server

    start_fork_server(config)
    run_training(config, resume=resume, newest_whole=newest_whole, replay=replay, rollout_only=rollout_only)


@app.command("eval")
def evaluate(settings: Settings = None) -> None:
    """Evaluate a model, or a checkpoint given as model=, on the sets in data.eval; a reward model on pairs of
    responses.
    """
    from braidrl.config import load_config
    from braidrl.runtimes.prepare.first_checks import check_first, check_sets

    # The training flow is irrelevant: a policy generates and is verified, a model with a score head scores pairs.
    file, changed = split(settings)
    config = load_config(file, changed, flow="grpo")
    check_first(config, trained=False)
    check_sets(config)
    from braidrl.flow.flow import policies_of
    from braidrl.runtimes.evaluation import evaluate_model
    from braidrl.runtimes.prepare.run_flow import build_flow
    from braidrl.runtimes.start import start_fork_server
    from braidrl.training.model_settings import has_score_head

    if has_score_head(config.model) and any(map(policies_of, build_flow(config).stages)):
        config = load_config(file, [*changed, "flow=reward_model", "algorithm={}"])
    start_fork_server(config)
    metrics = evaluate_model(config)
    # Under torchrun only the first rank prints.
    for name, value in metrics.items() if os.environ.get("RANK", "0") == "0" else ():
        say(f"{name}\t{value:.4f}")


@app.command()
def flow(
    config: Annotated[str, typer.Argument(help="A recipe, a YAML flow, module:function, or a configuration file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted key=value.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Also write the text as a picture into this file.")] = None,
    yaml: Annotated[bool, typer.Option("--yaml", help="Print the flow's YAML form.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print the flow as a Mermaid flowchart.")] = False,
) -> None:
    """Show a flow: its stages, the columns that each reads and writes, and stages that may run at the same time."""
    from braidrl.config import apply_override, load_config
    from braidrl.flow import drawing
    from braidrl.flow.recipes import load_flow
    from braidrl.flow.yaml_form import to_yaml
    from braidrl.parsing import read_yaml

    # Overrides change the configuration of a file, whose flow is resolved, or otherwise the recipe's parameters.
    path, params = Path(config), dict[str, Any]()
    if path.suffix in (".yaml", ".yml") and path.is_file() and "stages" not in (read_yaml(path) or {}):
        from braidrl.runtimes.prepare.run_flow import build_flow

        shown = build_flow(load_config(path, overrides or []))
    else:
        for override in overrides or []:
            apply_override(params, override)
        shown = load_flow(config, params, {"max_response_tokens": 512, "samples_per_prompt": 8})
    say(to_yaml(shown) if yaml else drawing.mermaid(shown) if mermaid else drawing.text(shown))
    if svg is not None:
        svg.write_text(drawing.svg(shown), encoding="utf-8")
        say(f"drawn in {svg}")


@app.command()
def data(settings: Settings = None) -> None:
    """Show the data of a configuration: counts, lengths, samples as the model sees them, and skipped records with
    reasons.
    """
    from braidrl.config import load_config
    from braidrl.runtimes.prepare.first_checks import check_first

    config = load_config(*split(settings), flow="grpo")
    check_first(config)
    from braidrl.cli.show_data import show_data

    show_data(config)


@app.command("import-config")
def import_config(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML of verl, TRL or AReaL, TOML of prime-rl, or a script that starts these, OpenRLHF or slime."
        ),
    ],
    target: Annotated[Path, typer.Argument(help="The Braid configuration to write.")] = Path("braid.yaml"),
) -> None:
    """Convert a configuration of verl, TRL, OpenRLHF, slime, AReaL or prime-rl, and say what became of each key."""
    from braidrl.cli.import_config import write_imported

    for line in write_imported(config, target):
        say(line)


@app.command("list")
def list_kind(
    kind: Annotated[str | None, typer.Argument(help="losses, advantages, rewards, ...; by default all kinds.")] = None,
) -> None:
    """List the names that a flow or a configuration can use, with settings and sources."""
    from braidrl.cli.catalogue import KINDS, catalogue, names

    if kind is None:
        for family in KINDS:
            say(f"{family}: {', '.join(names(family))}")
        return
    for listed in catalogue(kind):
        say(f"{listed.name}\n    {listed.about}")
        if listed.settings:
            settings = ", ".join(f"{name}={default}" for name, default in listed.settings.items())
            say(f"    settings: {settings}")
        if listed.reads:
            say(f"    reads: {', '.join(listed.reads)}")


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="A model's folder, config.json, or hub id in this machine's cache.")],
    layouts: Annotated[bool, typer.Option("--layouts", help="Also compare two ranks in each layout.")] = False,
    vllm: Annotated[Path | None, typer.Option(help="Also compare with vLLM, by an interpreter that has it.")] = None,
) -> None:
    """Check on a tiny model of the same structure that a model trains correctly; the exit code is 1 if it may not
    train.
    """
    from braidrl.config.paths import is_hub_name

    if not Path(model).expanduser().exists() and not is_hub_name(Path(model)):
        raise UserError(f"braid check {model}: there is no such folder or file; give a model's folder or config.json")
    from braidrl.training.pretrained import config_of

    config_of(model)
    from braidrl.cli.check_model import check as check_model

    if not check_model(model, layouts, typer.echo, vllm):
        raise typer.Exit(1)


@app.command()
def plan(
    settings: Settings = None,
    devices: Annotated[str, typer.Option(help="NODESxDEVICESxKIND, as 8x8xH100-80GB; a .yaml file; or cpu.")] = "cpu",
    lengths: Annotated[str | None, typer.Option(help="Response lengths: a run, TOKENS, or MEDIAN:LONGEST.")] = None,
    seconds: Annotated[list[str] | None, typer.Option(help="STAGE=SECONDS, if it has no cost model.")] = None,
    rates: Annotated[Path | None, typer.Option(help="A file of rates, as written by --calibrate.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="Consider streaming with staleness up to this.")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds to search; the best plan so far counts.")] = None,
    overlay: Annotated[Path, typer.Option(help="File for the best plan.")] = Path("overlay.yaml"),
    trace: Annotated[Path | None, typer.Option(help="File for its predicted timeline, for Perfetto.")] = None,
    calibrate: Annotated[list[Path] | None, typer.Option(help="A run to fit rates to, saved to --rates.")] = None,
) -> None:
    """Find the fastest placement, layouts and runtime for a configuration on given devices, without these devices."""
    from braidrl.cluster.device_kinds import read_cluster
    from braidrl.config import load_config
    from braidrl.runtimes.prepare.first_checks import check_first

    if calibrate:
        from braidrl.cli.plan_command import calibrated

        file = rates or Path("rates.yaml")
        calibrated(calibrate, devices, file)
        say(f"rates fitted to {len(calibrate)} runs are in {file}; use them with --rates {file}")
        return
    config = load_config(*split(settings))
    read_cluster(devices)
    check_first(config, trained=False, evaluated=False)
    from braidrl.cli.plan_command import PlanOptions
    from braidrl.cli.plan_command import plan as find_plans
    from braidrl.observe.progress import Terminal

    request = PlanOptions(devices, lengths, seconds or (), rates, max_staleness, time_limit)
    find_plans(config, request, overlay, trace, Terminal())


@app.command()
def doctor(
    settings: Settings = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check a Ray cluster, and a configuration's paths.")
    ] = False,
) -> None:
    """Check this machine: versions, devices, memory, and a training step on a tiny model.

    With --cluster, every node of a Ray cluster.
    """
    from braidrl.cli.doctor import examine, examine_cluster
    from braidrl.config import load_config

    if not cluster and settings:
        raise UserError("braid doctor takes no configuration for this machine; write --cluster for a cluster's nodes")
    config = load_config(*split(settings), flow="grpo") if settings else None
    if not (examine_cluster(config, typer.echo) if cluster else examine(typer.echo)):
        raise typer.Exit(1)


@app.command(context_settings={"ignore_unknown_options": True})
def workers(
    run: RunFolder,
    more: Annotated[int, typer.Argument(metavar="+N|-N", help="How many engines join or leave.")],
    group: Annotated[str, typer.Argument(help="Their worker group, as in streaming.workers.")] = "actor.generate",
) -> None:
    """Let engines join or leave a run of runtime=streaming while it runs; its result does not change."""
    from braidrl.runtimes.streaming.resizing import ask

    if not more:
        raise UserError("braid workers: 0 engines neither join nor leave; write +1 or -1")
    say(ask(run, more, group))


@app.command()
def report(run: RunFolder) -> None:
    """Write RUN/report.html: curves, and sample responses over time."""
    from braidrl.observe.report import write_report

    say(write_report(run))


@app.command()
def timeline(run: RunFolder) -> None:
    """Show busy and idle times of processes in a table, and write RUN/timeline.json for Perfetto."""
    from braidrl.observe.trace import timeline

    for line in timeline(run):
        say(line)


@app.command()
def rollouts(
    run: RunFolder,
    evaluation: Annotated[str | None, typer.Option("--set", help="An evaluation set; by default training.")] = None,
    step: Annotated[int | None, typer.Option(help="Rows of this step.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Rows with at least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Rows with at most this reward.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Rows with at least so many sampled tokens.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Rows with at most so many.")] = None,
    ended: Annotated[str | None, typer.Option(help="Rows that ended so: stop, length, error or repeat.")] = None,
    sort: Annotated[str, typer.Option(help="A column, as reward; -reward shows the largest first.")] = "",
    rows: Annotated[int, typer.Option(help="The most rows to print.", min=1)] = 20,
    row: Annotated[str | None, typer.Option(help="Print this row in full: STEP.GROUP.SAMPLE.")] = None,
    web: Annotated[bool, typer.Option("--web", help="Serve a page on this machine instead.")] = False,
    port: Annotated[int, typer.Option(help="The page's port; 0 takes a free one.", min=0, max=65535)] = 0,
) -> None:
    """Show the recorded rows of a run: a table, one episode in full (--row), or a web page (--web)."""
    from braidrl.cli.show_rollouts import serve, show_row, show_table
    from braidrl.observe.episodes import Filter

    rows_to_show = Filter(step, min_reward, max_reward, min_tokens, max_tokens, ended, sort)
    if web:
        if row is not None or evaluation is not None or rows_to_show != Filter():
            raise UserError("--web has its own filters; write it alone, with --port")
        serve(run, port, say)
    elif row is not None:
        show_row(run, evaluation, row, say)
    else:
        show_table(run, evaluation, rows_to_show, rows, say)


@app.command()
def export(
    run: RunFolder,
    folder: Annotated[Path, typer.Argument(help="A new folder for the Hugging Face model.")],
    role: Annotated[str | None, typer.Option(help="By default the actor, or the only role.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint, if evaluation.best keeps it.")] = False,
) -> None:
    """Copy a role's model out of a run's latest checkpoint (or a checkpoint folder) as a Hugging Face directory."""
    from braidrl.runtimes.saving.folders import checkpoint_to_export

    checkpoint_to_export(run, best)
    from braidrl.runtimes.saving.checkpoints import export_model

    say(export_model(run, folder, role, best))


@checkpoint.command("check")
def check_checkpoints(run: RunFolder) -> None:
    """Check every file of a run's checkpoints against its checksum; the exit code is 1 if one is damaged."""
    from braidrl.runtimes.saving.folders import checkpoints_of

    folders = checkpoints_of(run)
    if not folders:
        raise UserError(f"{run} has no checkpoint")
    from braidrl.runtimes.saving.checkpoints import checkpoint_damage

    troubles = {folder: checkpoint_damage(folder) for folder in folders}
    for folder, trouble in troubles.items():
        say(f"{folder}: {trouble or 'whole'}")
    if any(troubles.values()):
        raise typer.Exit(1)


@app.command(hidden=True)
def verify(run: RunFolder) -> None:
    """Report the command's new name."""
    raise UserError(f"braid verify is called `braid checkpoint check {run}`")


def say(text: Any, err: bool = False) -> None:
    """Print a text without control characters; it may hold names and values of users' files."""
    typer.echo(printable(str(text), keep="\n\t"), err=err)


def main() -> None:
    """Run the command; a user error ends with one line and an exit code, Ctrl-C with 130."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1 or os.environ.get("BRAID_DEBUG") == "1"
    sleep_at_barriers()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on stderr: a character that the terminal cannot show is written as its number.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        for limit, (least, unit, what) in LEAST.items():
            most, _ = resource.getrlimit(limit)
            if most != resource.RLIM_INFINITY and most < least:
                raise UserError(
                    f"this process may have {most / unit:.4g} {what}, and needs at least {least / unit:g}; raise the "
                    "limit"
                )
        app(arguments, standalone_mode=True)
    except Exception as error:
        # A worker's message already has a traceback.
        is_known = isinstance(error, UserError | WorkerError)
        message = str(error) if is_known else no_room(error) or limit_reached(error)
        if not message and isinstance(error, WRONG_PATH) and error.filename:
            message = f"{error.filename}: {error.strerror}; give another path"
        if not message or (debug and not isinstance(error, WorkerError)):
            raise
        for line in message.splitlines() if isinstance(error, Problems) else [message]:
            say(f"braid: {line}", err=True)
        sys.exit(EXIT_FAILURE if isinstance(error, FailedStep | WorkerError) else EXIT_USER_ERROR)
    finally:
        # Another Ctrl-C during the interpreter's shutdown would print tracebacks.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
