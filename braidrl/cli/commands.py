"""The `braid` command: its subcommands and exit codes. A user error is a message of one line; `--debug` adds the traceback."""

import atexit
import gc
import io
import os
import platform
import resource
import signal
import sys
from typing import Annotated

import typer

from braidrl import __version__
from braidrl.cli.machine_commands import doctor, plan
from braidrl.cli.run_commands import check_checkpoints, export, report, timeline, verify
from braidrl.cli.show_commands import check, data, flow, import_config, list_kind
from braidrl.cli.train_command import evaluate, train
from braidrl.cluster.process import sleep_at_barriers
from braidrl.errors import FailedStep, Problems, UserError, WorkerError, limit_reached, no_room
from braidrl.importing import OBJECTS_BETWEEN_COLLECTIONS, version_of

EXIT_FAILURE = 1
ADDRESS_SPACE_BYTES = 2 << 30
EXIT_USER_ERROR = 2


def show_version(asked: bool) -> None:
    """Print the versions for a bug report, and exit."""
    if asked:
        packages = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers"))
        typer.echo(f"braid {__version__}, {packages}, Python {platform.python_version()}")
        raise typer.Exit


def before_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models."""


app = typer.Typer(callback=before_commands,
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip
checkpoint = typer.Typer(no_args_is_help=True, help="A run's checkpoints.")
app.command()(train)
app.command("eval")(evaluate)
app.command()(check)
app.command()(flow)
app.command()(data)
app.command()(plan)
app.command("list")(list_kind)
app.command("import-config")(import_config)
app.command()(report)
app.command()(timeline)
app.command()(export)
app.add_typer(checkpoint, name="checkpoint")
checkpoint.command("check")(check_checkpoints)
app.command(hidden=True)(verify)
app.command()(doctor)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C from now on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def check_address_space() -> None:
    """Raise UserError if the address space is too small to load torch and transformers, which would fail in unpredictable ways."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY and most < ADDRESS_SPACE_BYTES:
        raise UserError(
            f"this process may have {most / 2**30:.1f} GiB of address space (ulimit -v), and needs at least "
            f"{ADDRESS_SPACE_BYTES / 2**30:.1f}; raise the limit"
        )


def main() -> None:
    """Run the command; a user error ends with one line and an exit code, Ctrl-C with 130."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1 or os.environ.get("BRAID_DEBUG") == "1"
    sleep_at_barriers()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # as stderr: a character that the terminal cannot show is written as its number
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        check_address_space()
        app(arguments, standalone_mode=True)
    except UserError as error:
        if debug:
            raise
        for line in str(error).splitlines() if isinstance(error, Problems) else [error]:
            typer.echo(f"braid: {line}", err=True)
        sys.exit(EXIT_FAILURE if isinstance(error, FailedStep) else EXIT_USER_ERROR)
    except OSError as error:
        said = no_room(error) or limit_reached(error)
        if debug or not said:
            raise
        typer.echo(f"braid: {said}", err=True)
        sys.exit(EXIT_USER_ERROR)
    except WorkerError as error:
        typer.echo(f"braid: {error}", err=True)
        sys.exit(EXIT_FAILURE)
    except (MemoryError, RuntimeError, ImportError) as error:
        if debug or not limit_reached(error):
            raise
        typer.echo(f"braid: {limit_reached(error)}", err=True)
        sys.exit(EXIT_USER_ERROR)
    finally:
        # Another Ctrl-C during the interpreter's shutdown would print tracebacks.
        atexit.register(ignore_interrupts)
