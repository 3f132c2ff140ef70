"""`python -m braidrl.cli` is the `braid` command."""

from braidrl.cli.commands import main

main()
