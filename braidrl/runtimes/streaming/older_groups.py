"""Which groups of a batch may be begun before the version that it is trained on, where it shall have a share of rows of that version.

group   0   1   2   3 │ 4   5   6   7       a batch of eight, on_policy_share=0.5: 0 to 3 may be begun with the version before,
        may be older  │ wait for version    4 to 7 wait for an engine with the batch's own; meanwhile it begins 0 to 3 of the next

Decided by group number when rows are begun, never by dropping what is done: a batch has as many places for older groups as the share
leaves, a group that selection drops gives its place to the next by number, and what has no place waits.
"""

from collections.abc import Mapping, Set


def older_places(share: float, prompts: int) -> int | None:
    """Return how many groups of a batch of `prompts` may be older than the version that it is trained on; None is all of them."""
    # rounded first, so that 0.9 of 10 leaves 1
    return int(round((1 - share) * prompts, 6)) if share else None


def waiting_groups(begun: Mapping[int, int | None], groups: Set[int], version: int, places: int) -> set[int]:
    """Return the groups of a batch that only an engine with the batch's own version may begin, or go on beginning.

    Args:
        begun: for each group that may come into the batch the oldest version that a row of it was begun with; None while none is.
        groups: those of them that are expected in it.
        version: the one that the batch is trained on.
        places: how many groups may be older.
    """
    older = {group for group, with_version in begun.items() if with_version is not None and with_version < version}
    others = sorted(groups - older)
    return set(others[max(0, places - len(older)) :])


def begun_too_many(begun: Mapping[int, int | None], places: int) -> set[int]:
    """Return the begun groups that would have no place in the next batch, for which they are older: all but the last by number."""
    found = sorted(group for group, version in begun.items() if version is not None)
    return set(found[: max(0, len(found) - places)])
