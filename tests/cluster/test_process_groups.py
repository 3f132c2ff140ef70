"""Process groups that are left are dropped beside the work that goes on."""

from __future__ import annotations

import threading
from typing import Any

from braidrl.cluster.process_groups import drop_unused


class SlowToEnd:
    """Stands for a group whose end waits for a collective."""

    def __init__(self, ended: list[str], may_end: threading.Event) -> None:
        self.ended, self.may_end = ended, may_end

    def __del__(self) -> None:
        self.may_end.wait(10.0)
        self.ended.append(threading.current_thread().name)


def test_the_last_reference_to_a_group_waits_for_its_end_in_a_thread_of_its_own() -> None:
    ended, may_end = list[str](), threading.Event()
    group = SlowToEnd(ended, may_end)
    left: list[Any] = [group]
    thread = threading.Thread(target=drop_unused, args=(left,), name="end of groups")
    thread.start()
    thread.join(0.2)
    assert left, "the group is in use"
    del group
    thread.join(0.2)
    assert not left and thread.is_alive() and not ended
    may_end.set()
    thread.join(10.0)
    assert ended == ["end of groups"]
