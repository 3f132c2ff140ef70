"""A hybrid backend on warm workers, without the run around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import ray

from braidrl.config import Config
from braidrl.data.loader import PromptLoader
from braidrl.flow import Flow
from braidrl.observe.progress import Progress
from braidrl.runtimes.hybrid.backend import HybridBackend
from braidrl.runtimes.hybrid.start import start_hybrid_backend
from braidrl.runtimes.prepare.setup import prepare
from tests.runtimes.hybrid.warm import WarmCluster


@contextmanager
def hybrid_crew(config: Config, cluster: WarmCluster, flow: Flow | None = None) -> Iterator[HybridBackend]:
    """The backend of a configuration, or of another flow on its data."""
    prepared = prepare(config)
    if flow is not None:
        prepared = replace(prepared, flow=flow)
    loader = PromptLoader(prepared.sources, config.seed)
    backend = start_hybrid_backend(prepared, loader, Progress(), None, cluster)
    try:
        yield backend
    finally:
        backend.close()


def rehearse(backend: HybridBackend, **orders: tuple[str, float]) -> None:
    """Has all workers wait, raise or die at the named stages (dots as two underscores)."""
    by_stage = {name.replace("__", "."): order for name, order in orders.items()}
    ray.get([actor.rehearse.remote(by_stage) for group in backend.distinct for actor in group.actors])
