"""The `braid` command: `commands` reads arguments and reports errors; the other modules each do the work of one command."""

from braidrl.cli.commands import main

__all__ = ["main"]
