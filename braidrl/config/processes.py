"""Which processes a run has, where roles live in them, and how long they wait for each other."""

from typing import Literal

from pydantic import Field, field_validator

from braidrl.config.section import Section


class StreamingConfig(Section):
    """How the streaming runtime spreads work; nothing here changes the result of a run without staleness."""

    workers: dict[str, int] = {}
    """Processes of a worker group, 1 where not named: `actor.generate`, `compute`, and each role that infers or trains."""
    dispatch_rows: int = Field(16, ge=1)
    """The most rows that a worker takes at once: fewer spread work sooner, more ask the queue less often."""
    sampler: str | dict[str, str] = "first_in"
    """Which of the rows that are ready a worker is given: `first_in`, `whole_groups`, `token_balanced`, `shortest_first`,
    `oldest_version`, or a function of yours, `module:function` or `path/to/file.py:function`; for all stages, or by stage."""
    storage: str = "shared_memory"
    """Where payload lies: `shared_memory`, `file:/path` on a disk, or `redis://host:port/0`."""
    weights: Literal["end", "delayed"] = "end"
    """An engine takes new weights when it has finished the rows that it has. With `delayed` it receives them while it goes on
    generating, and all engines load them together when the batch's generation is over."""
    lease_s: float = Field(600.0, gt=0)
    """Seconds without progress after which a worker's rows are given to another."""
    wait_s: float = Field(5.0, gt=0)
    """Seconds after which a worker that has found nothing to do asks again."""

    @field_validator("workers")
    @classmethod
    def _positive(cls, value: dict[str, int]) -> dict[str, int]:
        if any(count < 1 for count in value.values()):
            raise ValueError("a worker group has at least one process")
        return value


class PoolConfig(Section):
    """Roles that share their processes."""

    short_for = {list: "roles"}
    roles: list[str] = Field(min_length=1)
    """Their names."""
    workers: int | None = Field(None, ge=1)
    """Processes, each with a device of its own; by default the configuration's `workers`."""


class PlacementConfig(Section):
    """Which roles share processes: a name (colocate, standalone, split), or the pools themselves."""

    short_for = {str: "name", list: "pools"}
    name: str = "colocate"
    """`colocate`: one pool for all; `standalone`: one for each role; `split`: one for the roles that generate, one for the others."""
    pools: list[PoolConfig] = []
    """Each role in one of them, in place of a name."""


class ClusterConfig(Section):
    """The processes of a run, and the Ray cluster that they may be on."""

    launcher: Literal["local", "torchrun", "ray"] | None = None
    """Who starts the ranks of `runtime: distributed` and the workers of `runtime: streaming`: this command, on this machine; Ray, on its
    cluster; or, for ranks, `torchrun`, which has started this command as one of them, and is the default there. Else it is `local`."""
    address: str | None = None
    """Address of a running cluster; by default RAY_ADDRESS, or a cluster of this machine that ends with the run."""
    cpus: int | None = Field(None, ge=1)
    """CPUs that a cluster of this machine offers, one for each worker; by default all."""
    start_limit_s: float = Field(300.0, gt=0)
    """Seconds for workers to start and load their models."""
    silence_s: float = Field(60.0, gt=0)
    """Seconds after which a process that is stopped, or says nothing, is named and killed; another gets its work, or the run ends."""
    wait_limit_s: float = Field(3600.0, gt=0)
    """Seconds without a word from a worker after which the run ends."""
