"""What the user reads when a worker fails: who, at what, on which rows, and the worker's own traceback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from braidrl.errors import UserError

ROWS_SHOWN = 8


class StageFailure(Exception):
    """Raised in a worker; its text is the whole story, since the exception behind it may not travel."""


class WorkerFailure(UserError):
    """Ends the run: a worker failed, died, or said nothing for too long."""


def named_rows(uids: Sequence[Any]) -> str:
    """` on 12 rows (source, group, sample): (0, 3, 0) (0, 3, 1) ...`; nothing for a call without rows."""
    if not uids:
        return ""
    shown = " ".join(str(tuple(uid)) for uid in uids[:ROWS_SHOWN])
    more = " ..." if len(uids) > ROWS_SHOWN else ""
    return f" on {len(uids)} rows (source, group, sample): {shown}{more}"
