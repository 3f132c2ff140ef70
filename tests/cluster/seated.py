"""An actor that does not import Braid, so that it starts at once."""

from __future__ import annotations

import os


class Seated:
    """Reports its process and its node."""

    def close(self) -> None: ...

    def process(self) -> int:
        return os.getpid()

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_placement_group_id()
