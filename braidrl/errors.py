"""A mistake of the user's: one line that says what is wrong, where, and what to write instead."""

from __future__ import annotations

from braidrl.algorithms.registry import suggest

__all__ = ["UserError", "suggest"]


class UserError(Exception):
    """Ends the command with its message alone; `--debug` adds the traceback."""
