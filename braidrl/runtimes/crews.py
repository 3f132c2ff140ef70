"""From a checked configuration to the crew that does the work: the one place that knows the runtimes by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from braidrl.cluster.ray_cluster import import_ray
from braidrl.data.loader import PromptLoader
from braidrl.errors import UserError
from braidrl.observe.progress import Progress
from braidrl.runtimes.eager import EagerCrew
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.iteration import Crew
from braidrl.runtimes.setup import Prepared


def start_crew(
    prepared: Prepared, loader: PromptLoader | None, progress: Progress, folder: Path | None = None
) -> Crew[Any]:
    """The crew of `config.runtime`; without a `loader` it only evaluates. `folder` is the run's, for what workers write.

    Raises UserError where the runtime cannot do what is asked of it.
    """
    runtime = prepared.config.runtime
    if runtime == "eager":
        return eager_crew(prepared, loader, progress)
    if runtime == "hybrid":
        # Imported here: Ray is an extra, and importing it takes a second.
        import_ray()
        from braidrl.runtimes.hybrid.start import start_hybrid_crew

        return start_hybrid_crew(prepared, loader, progress, folder)
    raise UserError(f"this version cannot run runtime={runtime}; write runtime=eager or hybrid")


def eager_crew(prepared: Prepared, loader: PromptLoader | None, progress: Progress) -> EagerCrew:
    """Every role in this process."""
    flow = prepared.flow if loader else prepared.evaluation
    executor = StageExecutor(
        prepared.config, flow, prepared.roles(train=loader is not None), prepared.tokenizer, prepared.rewards(),
        progress, prepared.generating,
    )  # fmt: skip
    return EagerCrew(prepared.config, flow, loader, executor, prepared.store())
