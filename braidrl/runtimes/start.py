"""Start of a run: from a checked configuration to its backend and controller. Only this module knows all runtimes."""

from pathlib import Path
from typing import Any

from braidrl.agents.environments import AGENTS
from braidrl.cluster.child import at_end
from braidrl.cluster.devices import device_count, visible_devices
from braidrl.cluster.local import ENGINES, copy_as_fork_server
from braidrl.cluster.membership import RepairBudget
from braidrl.cluster.ray_cluster import import_ray
from braidrl.cluster.row_deaths import RowDeaths
from braidrl.cluster.world import World
from braidrl.config import Config
from braidrl.data.curricula import check_curriculum, curriculum_of, units_of
from braidrl.data.loader import PromptLoader
from braidrl.data.token_columns import returned_columns
from braidrl.engines.deployment import MODES, Deployment, Engines
from braidrl.errors import UserError
from braidrl.flow import Kind
from braidrl.flow.selecting import GroupSelector
from braidrl.flow.signatures import columns_of
from braidrl.observe.progress import Progress
from braidrl.observe.trace import TraceWriter
from braidrl.runtimes.controller import SerialController
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.interfaces import Controller, Interrupts, SerialBackend
from braidrl.runtimes.prepare.run_data import Prepared
from braidrl.runtimes.row_store import RowStore
from braidrl.runtimes.spmd.rank_backend import RankBackend
from braidrl.runtimes.streaming.groups import check_streaming
from braidrl.runtimes.streaming.program import StreamingController
from braidrl.training.parallel.layouts import DataParallel


def start_fork_server(config: Config) -> None:
    """Start the fork server of a run with local ranks, workers or engines.

    `copy_as_fork_server` explains when to call it.
    """
    mode, engines = MODES[config.runtime], Engines.of(config).started
    if config.cluster.launcher != "ray" and not mode.placed and (mode.sharded or engines):
        copy_as_fork_server(ENGINES if engines else ())


def start_backend(
    prepared: Prepared,
    progress: Progress,
    folder: Path | None = None,
    world: World | None = None,
    interrupts: Interrupts | None = None,
    any_stage: bool = False,
) -> SerialBackend[Any]:
    """Return the backend of `config.runtime`, whose stages the serial controller or a session calls; streaming
    evaluates eagerly.

    `folder` is the run's, for files of workers. `world` holds the ranks of a distributed run, which stop together by
    `interrupts`. With `any_stage` the caller may run stages outside the flow, as a session does. Raises UserError if
    the runtime does not support the request.
    """
    world, interrupts = world or World(), interrupts or Interrupts()
    deployment, config = prepared.deployment, prepared.config
    if deployment.mode.placed:
        # Imported here: Ray is optional, and its import takes a second.
        import_ray()
        from braidrl.runtimes.hybrid.driver import start_hybrid_backend

        return start_hybrid_backend(prepared, progress, folder)
    ranks = DataParallel(supervisor=world)
    executor = StageExecutor(prepared, deployment.roles, progress, deployment.generating, ranks)
    name = "eager"
    if deployment.mode.chained:
        name = f"rank-{world.rank}"
        at_end.append(executor.close)
    store = RowStore(prepared, curriculum_of(config, units_of(config, prepared.sources)))
    # Only now: a refused run leaves only its configuration in its folder.
    trace = executor.generation.moves.trace = TraceWriter(folder, name) if folder else None
    return RankBackend(executor, store, world, interrupts, trace, any_stage)


def start_controller(
    prepared: Prepared,
    progress: Progress,
    folder: Path,
    world: World,
    interrupts: Interrupts,
    repairs: RepairBudget,
    deaths: RowDeaths,
) -> Controller[Any]:
    """Return the controller of `config.runtime`, with its backend and workers started.

    `repairs` limits how often lost trainers are replaced, and `deaths` has the rows to isolate; other arguments are as
    for `start_backend`.
    """
    config = prepared.config
    if prepared.deployment.mode.concurrent:
        curriculum = curriculum_of(config, units_of(config, prepared.sources))
        loader = PromptLoader(prepared.sources, config.seed, config.data.shuffle, curriculum)
        return StreamingController(prepared, loader, folder, progress, repairs)
    backend = start_backend(prepared, progress, folder, world=world, interrupts=interrupts)
    backend.deaths = deaths
    return SerialController(config, prepared.flow, backend)


def check_runtime(deployment: Deployment, generates: bool, trains: bool, planned: bool = False) -> None:
    """Raise UserError, before anything is made, if the runtime does not support the flow; a `planned` run may be for
    another machine.
    """
    config, flow = deployment.config, deployment.flow
    trainer, rollout = config.trainer, config.rollout
    GroupSelector(trainer.prompts_per_step, 1, trainer.surplus, trainer.max_staleness)
    if trainer.over_sampling > 1 and not flow.sampling_segment:
        raise UserError(f"trainer.over_sampling replaces dropped groups, and flow {flow.name} selects none; remove it")
    check_curriculum(config, [name for stage in flow.stages for name in stage.writes])
    if rollout.tokens_per_iteration is None and rollout.repeated_tokens is not None:
        raise UserError("rollout.repeated_tokens ends suspended responses; write rollout.tokens_per_iteration too")
    if rollout.tokens_per_iteration is not None:
        setting = f"rollout.tokens_per_iteration={rollout.tokens_per_iteration}"
        generating = [stage for stage in flow.stages if stage.kind is Kind.GENERATE]
        if len(generating) != 1 or {"into", "policies"} & generating[0].params.keys():
            raise UserError(
                f"{setting} suspends the one response of a row, and flow {flow.name} generates none, several, one with "
                "a name (`into`) or several `policies`; remove it"
            )
        played, environment = str(generating[0].params.get("environment", "")), rollout.environment
        if played.startswith(AGENTS):
            raise UserError(f"{setting} suspends episodes, and the loop of {played} cannot be played again; remove it")
        if played and environment.resume is None:
            raise UserError(
                f"{setting} suspends episodes; write rollout.environment.resume=replay if {played} answers the same "
                "actions always alike, else end"
            )
        if played and rollout.repeated_tokens is not None:
            raise UserError("rollout.repeated_tokens ends suspended responses, and these are episodes; remove it")
        columns = returned_columns(columns_of(generating[0]))
        aligned = [column.name for column in columns if column.alignment == "tokens"]
        if played and aligned:
            raise UserError(f"{setting} suspends episodes, which cannot resume {aligned[0]}; remove it")
        if trainer.max_staleness < 1 or trainer.surplus != "keep":
            raise UserError(
                f"{setting} resumes responses later; write trainer.max_staleness=1 and trainer.surplus=keep"
            )
    devices = device_count(config.device)
    if not deployment.mode.sharded and devices is not None and not (planned and devices == 0):
        visible_devices(devices, deployment.engines.started, deployment.engines.layout.ranks)
    if deployment.mode.concurrent:
        check_streaming(deployment)
        if not (generates and trains):
            raise UserError("runtime=streaming generates and trains; to record or replay rollouts write runtime=eager")
