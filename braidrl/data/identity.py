"""Identity and end of a row, for programs that read rows without torch."""

from enum import IntEnum

Uid = tuple[int, int, int]
"""Source, group and sample of a row."""
IDENTITY = ("source", "group", "sample")


class FinishReason(IntEnum):
    """The reason why a trajectory ended; values of the `finish_reason` index column."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPEAT = 4
