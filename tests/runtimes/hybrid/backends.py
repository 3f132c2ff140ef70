"""A hybrid backend on warm workers, without the run around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from braidrl.config import Config
from braidrl.flow import Flow
from braidrl.flow.yaml_form import to_yaml
from braidrl.observe.progress import Progress
from braidrl.runtimes.hybrid.driver import HybridBackend, start_hybrid_backend
from braidrl.runtimes.prepare.setup import without_data
from tests.runtimes.hybrid.warm import WarmCluster


@contextmanager
def hybrid_crew(config: Config, cluster: WarmCluster, flow: Flow | None = None) -> Iterator[HybridBackend]:
    """Return the backend of a configuration, or of another flow on its data."""
    if flow is not None:
        path = config.output / f"{flow.name}.yaml"
        path.write_text(to_yaml(flow))
        config = config.model_copy(update={"flow": str(path)})
    backend = start_hybrid_backend(without_data(config), Progress(), None, cluster=cluster)
    try:
        yield backend
    finally:
        backend.close()


def rehearse(backend: HybridBackend, **orders: tuple[str, float]) -> None:
    """Make all workers wait, raise or die at the named stages (two underscores for a dot)."""
    by_stage = {name.replace("__", "."): order for name, order in orders.items()}
    ray.get([actor.rehearse.remote(by_stage) for group in backend.distinct for actor in group.actors])


def release(backend: HybridBackend) -> None:
    """Release the calls that workers are holding."""
    aside = {"concurrency_group": "aside"}
    ray.get([actor.release.options(**aside).remote() for group in backend.distinct for actor in group.actors])


def told(backend: HybridBackend, method: str) -> list[list[Any]]:
    """Return what a method of each worker returns, by pool."""
    return [[ray.get(getattr(actor, method).remote()) for actor in group.actors] for group in backend.distinct]
