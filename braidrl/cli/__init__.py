"""The `braid` command.

`commands` is the list of all commands, which are defined in `train_command`, `show_commands`, `machine_commands` and `run_commands`. The
other modules each do the work of one command, which imports them when it runs.
"""

from braidrl.cli.commands import main

__all__ = ["main"]
