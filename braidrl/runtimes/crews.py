"""From a checked configuration to the crew that does the work: the one place that knows the runtimes by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    raise UserError(f"this version cannot run runtime={runtime}; write runtime=eager")


def eager_crew(prepared: Prepared, loader: PromptLoader | None, progress: Progress) -> EagerCrew:
    """Every role in this process."""
    flow = prepared.flow if loader else prepared.evaluation
    executor = StageExecutor(
        prepared.config, flow, prepared.roles(train=loader is not None), prepared.tokenizer, prepared.rewards(),
        progress, prepared.generating,
    )  # fmt: skip
    return EagerCrew(prepared.config, flow, loader, executor, prepared.store())
