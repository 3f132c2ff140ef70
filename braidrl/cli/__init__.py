"""The `braid` command: `commands` lists all subcommands; each other module does the work of one."""

from braidrl.cli.commands import main

__all__ = ["main"]
