"""From a checked configuration to the backend that does the work: the one place that knows the runtimes by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from braidrl.cluster.rank import at_end
from braidrl.cluster.ray_cluster import import_ray
from braidrl.cluster.world import World
from braidrl.config import Config
from braidrl.data.loader import PromptLoader
from braidrl.errors import UserError
from braidrl.flow import Flow
from braidrl.flow.waves import GroupSelector
from braidrl.observe.progress import Progress
from braidrl.observe.trace import TraceWriter
from braidrl.runtimes.controller import Backend, RunBackend, SerialController
from braidrl.runtimes.distributed.backend import DistributedBackend
from braidrl.runtimes.distributed.launch import generating_ranks
from braidrl.runtimes.eager import EagerBackend
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.interrupts import AgreedInterrupts, Interrupts
from braidrl.runtimes.prepare.setup import Prepared
from braidrl.runtimes.streaming.groups import check_streaming
from braidrl.runtimes.streaming.program import StreamingProgram


def start_backend(
    prepared: Prepared,
    loader: PromptLoader | None,
    progress: Progress,
    folder: Path | None = None,
    world: World | None = None,
    interrupts: Interrupts | None = None,
) -> RunBackend[Any]:
    """The backend of `config.runtime`; without a `loader` it only evaluates. `folder` is the run's, for what workers write.
    `world` are the ranks of a distributed run, which end by `interrupts` together.

    Raises UserError where the runtime cannot do what is asked of it.
    """
    runtime = prepared.config.runtime
    some_generate = [role for role, own in prepared.config.roles.items() if own.generate_workers is not None]
    if some_generate and runtime != "distributed":
        raise UserError(
            f"roles.{some_generate[0]}.generate_workers is for runtime=distributed; remove it, or place roles by `placement`"
        )
    # Without training there is nothing to stream to.
    if runtime == "eager" or (runtime == "streaming" and loader is None):
        return eager_backend(prepared, loader, progress, folder)
    if runtime == "hybrid":
        # Imported here: Ray is an extra, and importing it takes a second.
        import_ray()
        from braidrl.runtimes.hybrid.start import start_hybrid_backend

        return start_hybrid_backend(prepared, loader, progress, folder)
    if runtime == "distributed":
        assert world is not None and isinstance(interrupts, AgreedInterrupts), "a rank is started by in_ranks"
        return distributed_backend(prepared, loader, progress, folder, world, interrupts)
    if loader is None or folder is None:
        raise UserError(
            "runtime=streaming has no order in which a session could call stages; write runtime=eager or hybrid"
        )
    return StreamingProgram(prepared, loader, folder)


def check_runtime(config: Config, flow: Flow, generates: bool, trains: bool) -> None:
    """Raises UserError, before anything is made, for what the runtime cannot run; a replay does not generate."""
    trainer = config.trainer
    GroupSelector(trainer.prompts_per_step, 1, trainer.surplus, trainer.max_staleness)
    if trainer.over_sampling > 1 and not flow.sampling_segment:
        raise UserError(
            f"trainer.over_sampling={trainer.over_sampling:g} begins groups in place of those that selection drops, and flow "
            f"{flow.name} selects none; remove it"
        )
    if config.runtime == "streaming":
        check_streaming(config, flow)
        if not (generates and trains):
            raise UserError("runtime=streaming generates and trains; to record or replay rollouts write runtime=eager")


def controller_for(
    backend: RunBackend[Any], config: Config, flow: Flow, epoch_groups: int
) -> SerialController[Any] | StreamingProgram:
    """Who goes through the iterations: the walk in serial order, or the stream, which has no order of its own."""
    if isinstance(backend, StreamingProgram):
        return backend
    return SerialController(config, flow, cast(Backend[Any], backend), epoch_groups)


def eager_backend(
    prepared: Prepared, loader: PromptLoader | None, progress: Progress, folder: Path | None = None
) -> EagerBackend:
    """Every role in this process."""
    flow = prepared.flow if loader else prepared.evaluation
    executor = StageExecutor(
        prepared.config, flow, prepared.roles(train=loader is not None), prepared.tokenizer, prepared.rewards(),
        progress, prepared.generating,
    )  # fmt: skip
    trace = TraceWriter(folder, "eager") if folder else None
    return EagerBackend(prepared.config, flow, loader, executor, prepared.store(), trace)


def distributed_backend(
    prepared: Prepared,
    loader: PromptLoader | None,
    progress: Progress,
    folder: Path | None,
    world: World,
    interrupts: AgreedInterrupts,
) -> DistributedBackend:
    """This rank's part of a backend of `world`: every role, and an engine on the ranks that generate."""
    config, flow = prepared.config, prepared.flow if loader else prepared.evaluation
    ranks = {role: generating_ranks(config, role, world.size) for role in prepared.generating}
    here = [role for role, count in ranks.items() if world.rank < count]
    executor = StageExecutor(
        config, flow, prepared.roles(train=loader is not None), prepared.tokenizer, prepared.rewards(), progress, here,
        world.data_parallel,
    )  # fmt: skip
    at_end.append(executor.close)
    trace = TraceWriter(folder, f"rank-{world.rank}") if folder else None
    return DistributedBackend(config, flow, loader, executor, prepared.store(), world, ranks, interrupts, trace)
