"""The hybrid driver: calls roles in the flow's order and returns handles at once; the rows stay with the workers.

driver      run(verify) ─ run(reference.log_probs) ─ run(critic.values) ─ index: waits ─ train ─ train ─ publish: waits
actor pool      ├── verify ──┤                                             ├─ update ─┤
reference pool          ├── log_probs ──┤
critic pool                        ├── values ──┤                          ├─ update ─┤

stage, Handle ──place──▶ group, rows of each rank ──begin──▶ Futures in an Output ──wait──▶ index columns
        └── without a role: deferred until its output is needed
"""

import itertools
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from braidrl.cluster.pools import GENERATE
from braidrl.cluster.ray_cluster import RayCluster
from braidrl.cluster.row_deaths import RowDeaths
from braidrl.data.codec import packed_size, payload_forbidden
from braidrl.data.curricula import curriculum_of
from braidrl.data.loader import Admissions
from braidrl.data.packing import balanced_partition, in_turn
from braidrl.data.rows import Column, Rows
from braidrl.errors import UserError, WorkerError, first_line
from braidrl.flow import Kind, Scope, Stage
from braidrl.flow.compute import computed, of_namespace, summed
from braidrl.flow.flow import is_optimized
from braidrl.flow.signatures import class_and_method, registration_of
from braidrl.importing import import_function
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Progress
from braidrl.observe.rollouts import publish, unpublished
from braidrl.observe.trace import TraceWriter, traced
from braidrl.runtimes.generating.verification import Segment
from braidrl.runtimes.hybrid.group import (
    Partition,
    RunWorkers,
    WorkerGroup,
    by_cost,
    rows_of_ranks,
    wait_all,
    where_computed,
)
from braidrl.runtimes.hybrid.handles import READ, CallResult, Handle, Output, columns_read
from braidrl.runtimes.hybrid.hybrid_worker import RunOrder
from braidrl.runtimes.hybrid.protocols import Mesh, Registration
from braidrl.runtimes.isolation import can_isolate, run_isolated
from braidrl.runtimes.prepare.run_data import Prepared
from braidrl.runtimes.row_store import TEXT_COLUMNS, Origin, RowText
from braidrl.runtimes.saving.checkpoints import check_written
from braidrl.training.objective import Objective, UpdateCounts, with_group_tokens
from braidrl.training.optimizer import CONFIGURED, StepOverrides
from braidrl.training.role_settings import settings_of
from braidrl.training.roles.checkpoint import Write


class HybridBackend:
    """Implements `SerialBackend` with handles.

    Every role has a worker group; the group `home` makes the rows, and runs stages without a role.
    """

    def __init__(
        self,
        loader: Admissions | None,
        workers: RunWorkers,
        progress: Progress,
        resources: ExitStack,
        trace: TraceWriter | None,
    ) -> None:
        """Store the parts started by `start_hybrid_backend`; `close` ends `resources`.

        Without a loader it only evaluates.
        """
        self.loader, self.workers, self.progress, self.config = loader, workers, progress, workers.prepared.config
        self.resources, self.trace = resources, trace
        self.home, self.distinct = workers.home, list(workers.groups)
        self.groups = {role: group for group in workers.groups for role in group.pool.roles}
        self.keys = itertools.count()
        self.training: list[Output] = []
        self.accumulated: dict[str, Stage] = {}
        """The latest train stage whose gradients wait for an optimizer step, by role."""
        self.deaths = RowDeaths()
        resources.enter_context(payload_forbidden())

    def read(self, origin: Origin) -> Handle:
        """Read rows on the ranks of `home`, a share on each."""
        for group in self.distinct:
            while group.unread:
                worker, number = group.unread.popleft()
                group.forgotten.setdefault(worker - group.first, []).append(number)
        key = next(self.keys)
        futures = self.home.call("make", origin, key)
        answers = self.home.wait(futures)
        output, ends = Output(READ), [0, *accumulate(packed_size(answer.index) for answer in answers)]
        output.begin(key, self.home, futures, [range(*edges) for edges in pairwise(ends)])
        output.finish(answers)
        return Handle((output,), torch.arange(len(output.row))[None])

    def run(self, stage: Stage, table: Handle, iteration: int, sums: Sums, segment: Segment | None = None) -> Handle:
        """Start a stage; without a role it is deferred until its output is needed.

        In a `segment` ranks exchange results.
        """
        if stage.role is not None and ":" in stage.type:
            written: Handle = self._call(stage, [table], iteration, sums)
            return written

        def run(stage: Stage, rows: Handle) -> Handle:
            done = self._begin_stage(stage, rows, iteration, sums)
            self._wait(done.outputs)
            return done

        if self.deaths.isolates and can_isolate(stage) and self.deaths.concern(uids := self.index(table).uids()):
            return run_isolated(run, stage, table, uids, self.deaths)
        return self._begin_stage(stage, table, iteration, sums, segment)

    def _begin_stage(
        self, stage: Stage, table: Handle, iteration: int, sums: Sums, segment: Segment | None = None
    ) -> Handle:
        """Start a stage with a role on all rows of a table together."""
        output = Output(stage, table, iteration, sums)
        if segment is not None:
            role, index = str(stage.role), self.index(table)
            group = self.groups.get(role + GENERATE, self.groups[role])
            # The last groups may not be needed: every rank starts with some of the first groups.
            parts = rows_of_ranks(in_turn(index["group"].numpy(), group.mesh.size).tolist(), group.mesh.size)
            self._begin(output, group, parts, None, segment)
        elif stage.role is not None:
            self._begin(output, *self._locate(stage, table))
        return table.with_output(output)

    def totals(self, stage: Stage, table: Handle) -> dict[str, float]:
        return {name: float(total) for name, total in self._totals(stage, table, *self._locate(stage, table)).items()}

    def train(self, stage: Stage, table: Handle, updates: Sequence[Sequence[int]], iteration: int, sums: Sums) -> None:
        """Start every optimizer step; `publish` waits for them."""
        group = self.groups[str(stage.role)]
        if not is_optimized(stage):
            copied = group.call("copy_weights", stage)
            self.training.append(Output(stage, None, iteration, sums, group, copied))
            return
        self.index(table)
        for update in updates:
            self._begin_training("update", stage, table.take(update), iteration, sums)

    def forward_backward(self, stage: Stage, table: Handle, iteration: int, sums: Sums) -> None:
        self.index(table)
        self._begin_training("forward_backward", stage, table, iteration, sums)
        self.accumulated[str(stage.role)] = stage

    def optim_step(self, role: str, iteration: int, sums: Sums, overrides: StepOverrides = CONFIGURED) -> None:
        stage, group = self.accumulated.pop(role), self.groups[role]
        futures = group.call("optim_step", stage, iteration, overrides)
        self.training.append(Output(stage, None, iteration, sums, group, futures))

    def _begin_training(self, method: str, stage: Stage, table: Handle, iteration: int, sums: Sums) -> None:
        """Call a method of the role's workers on their parts of the rows, with the counts of all rows."""
        group, objective = self.groups[str(stage.role)], Objective.of(str(stage.role), stage.params)
        rows = of_namespace(table.index, objective.namespace)
        counts = ray.put(UpdateCounts.of(rows))
        if "group_tokens" in objective.aggregation.reads:
            counted = Output(stage, index=with_group_tokens(rows.only(("group",)), rows).only(("group_tokens",)))
            table = table.with_output(counted)
        parts = by_cost(rows, group.mesh.size, self.config, objective.role, True, objective.whole_groups)
        table = replace(table, parts=parts)
        reads = frozenset((*columns_read(stage), *table.index, "group_tokens"))
        futures = group.call(method, table, counts, stage, iteration, reads=reads)
        self.training.append(Output(stage, None, iteration, sums, group, futures))

    def publish(self, version: int) -> None:
        """Wait for all training, then load the weights into the engines."""
        for output in self.training:
            self._answers(output)
        self.training = []
        wait_all((group, group.call("publish", version)) for group in self.distinct)

    def begin_again(self) -> bool:
        self.training = []
        try:
            for line in self.workers.replace_lost():
                self.progress.print(line)
        except (WorkerError, UserError) as error:
            # The caller reports the loss, and restarts the whole run.
            self.progress.print(f"what was lost could not be replaced alone: {first_line(error)}")
            return False
        return True

    def is_awaited(self) -> bool:
        return self.workers.can_grow()

    def call(self, role: str, method: str, arguments: Sequence[Any], iteration: int, sums: Sums) -> Any:
        """Call a user's method of the class that `roles.ROLE.methods` names through its transfer protocol, and return
        the collected result.

        If the method writes columns, the result is a table, returned immediately. Raises UserError if there is no such
        method.
        """
        owner = str(self.config.roles[role].methods)
        registration = registration_of(import_function(owner), method)
        kind, name = Kind.INFER, f"{role}.{method}"
        stage = Stage(name, f"{owner}.{method}", role, kind=kind, reads=registration.reads, writes=registration.writes)
        return self._call(stage, arguments, iteration, sums)

    def _call(self, stage: Stage, arguments: Sequence[Any], iteration: int, sums: Sums) -> Any:
        """Call the user's method that a stage names by its protocol, with the mesh of the stage's role."""
        registration: Registration = registration_of(*class_and_method(stage.type))
        role, config, key = str(stage.role), self.config, next(self.keys)
        group = self.groups[role]
        layout = settings_of(role, config).layout.resolve(group.pool.workers)
        engines = self.workers.prepared.deployment.engines
        pooled = engines.pools_ranks and role in group.pool.generating
        groups = engines.layout.groups(layout).flatten(1).tolist() if pooled else []
        mesh = Mesh(layout.data or 1, layout.pipeline, layout.tensor, layout.token_ranks, tuple(map(tuple, groups)))
        for table in arguments:
            if isinstance(table, Handle):
                self._begin_deferred(table.writers(registration.reads))
        calls = registration.protocol.distribute(mesh, *arguments)
        sent = [None if call is None else (stage, iteration, key, *call) for call in calls]
        reads = columns_read(stage)
        futures = [
            group.send(rank, "call_user_method", call, reads) for rank, call in enumerate(sent) if call is not None
        ]
        if not registration.writes:
            answers = self._answers(Output(stage, None, iteration, sums, group, futures))
            return registration.protocol.collect(mesh, calls, [answer.result for answer in answers])
        results = []
        for future, (rows, *_) in zip(futures, [call for call in calls if call is not None], strict=True):
            output = Output(stage, None, iteration, sums)
            output.begin(key, group, [future], [range(len(rows))])
            results.append(rows.with_output(output))
        return registration.protocol.collect(mesh, calls, results)

    def index(self, table: Handle) -> Rows:
        """Wait for all started stages, and compute deferred ones."""
        self._wait(table.outputs)
        return table.index

    def texts(self, table: Handle) -> list[RowText]:
        group, parts = self._where_made(table)
        answers = group.wait(group.call("texts", [table.take(rows) for rows in parts], reads=TEXT_COLUMNS))
        pairs = [
            pair for rows, answer in zip(parts, answers, strict=True) for pair in zip(rows, answer.result, strict=True)
        ]
        return [text for _, text in sorted(pairs)]

    def record(self, path: Path, table: Handle, final: Handle) -> None:
        """Write the rows from the ranks that generated them; one worker of each node joins the files of its ranks."""
        group, parts = self._where_made(table)
        self.index(final)
        new = [n for n, output in enumerate(final.outputs) if output not in table.outputs]
        later = Handle(tuple(final.outputs[n] for n in new), final.rows[new])
        shares, added = ([handle.take(rows) for rows in parts] for handle in (table, later))
        group.wait(group.call("record", [ray.put(path.resolve())] * len(parts), shares, added))
        ranks_of = defaultdict[str, list[int]](list)
        for rank in (rank for rank, rows in enumerate(parts) if rows):
            ranks_of[group.nodes[rank]].append(rank)
        shutil.rmtree(unpublished(path), ignore_errors=True)
        sent = [
            group.send(ranks[0], "merge_recorded", (path.resolve(), number, ranks))
            for number, ranks in enumerate(ranks_of.values())
        ]
        names = [answer.result for answer in group.wait(sent)]
        if any(columns != names[0] for columns in names):
            raise ValueError(f"ranks have recorded other columns than others: {names}")
        if names:
            publish(path)

    def save_rows(self, path: Path, table: Handle) -> None:
        """Write the rows from the ranks that generated them, during a running call if there is one."""
        group, parts = self._where_made(table)
        folder, shares = ray.put(path.resolve()), [table.take(rows) for rows in parts]
        group.wait(group.call("keep", [folder] * len(parts), shares, aside=True))

    def save(self, folder: Path, copy: bool = False) -> list[Write]:
        """Save while generation runs, so that an interrupt need not wait for it; a sharded model is saved after the
        call.

        With `copy` each worker continues as soon as it has copies, and writes them in a thread.
        """
        started = []
        for group in self.distinct:
            layouts = [settings_of(role, self.config).layout for role in group.pool.models]
            replicated = all(layout.resolve(group.mesh.size).is_replicated for layout in layouts)
            aside = replicated and not self.workers.prepared.deployment.engines.pools_ranks
            started.append((group, group.call("save", folder.resolve(), copy, aside=aside)))
        wait_all(started)
        return [partial(written, group, group.actors) for group in self.distinct] if copy else []

    def load(self, folder: Path, version: int) -> None:
        wait_all((group, group.call("load", folder.resolve())) for group in self.distinct)
        self.publish(version)

    def close(self) -> None:
        self.resources.close()

    def _where_made(self, table: Handle) -> tuple[WorkerGroup, Partition]:
        """Wait for the rows; return the group that generated or read them, and the rows of each of its ranks."""
        self.index(table)
        generating = [o for o in table.outputs if o.stage.type == "generate" and "tokens" in o.stage.writes]
        return where_computed(table, [*generating, *(output for output in table.outputs if output.stage is READ)])

    def _locate(self, stage: Stage, table: Handle) -> tuple[WorkerGroup | None, Partition]:
        """Start the inputs of a stage, or wait for those of a compute stage; then return the stage's group, and the
        rows of each of its ranks.

        A compute stage runs at `home`, where its payload is, with the rows of a group on one rank. If it reads only
        index columns the group is None, and the rows are those of `home`. Answers are verified where they were
        generated.
        """
        home, reads = self.home, columns_read(stage)
        writers = table.writers(reads)
        self._begin_deferred(writers)
        if stage.role is None:
            self._wait(writers)
            holders = [output for output in table.outputs if output.holds(reads)]
            if stage.scope is Scope.GROUP:
                groups = table.index["group"].tolist()
                return home if holders else None, balanced_partition([1.0] * len(table), home.mesh.size, groups=groups)
            if not holders:
                return None, by_cost(table.index, home.mesh.size, self.config)
            return where_computed(table, holders)
        if stage.type == "verify":
            tokens = f"{stage.params['of']}.tokens" if "of" in stage.params else "tokens"
            generated = [o for o in table.outputs if o.stage.type == "generate" and tokens in o.stage.writes]
            if not generated:
                return home, by_cost(table.index, home.mesh.size, self.config)
            return where_computed(table, generated)
        group = self.groups[stage.role]
        if stage.kind is Kind.GENERATE:
            group = self.groups.get(stage.role + GENERATE, group)
        if stage.type != "generate":
            return group, by_cost(table.index, group.mesh.size, self.config, stage.role)
        # All rows of a prompt are generated on one rank, unless ranks would have no work.
        costs, prompts = table.index["prompt_length"].tolist(), table.index["group"].tolist()
        enough = len(set(prompts)) >= group.mesh.size
        return group, balanced_partition(costs, group.mesh.size, groups=prompts if enough else None, equal_size=True)

    def _begin(self, output: Output, group: WorkerGroup | None, parts: Partition, *more: Any) -> None:
        """Send a stage that writes columns to a group; None means `home`."""
        assert output.table is not None
        group = group or self.home
        key, rows = next(self.keys), replace(output.table, parts=parts)
        reads = columns_read(output.stage)
        futures = group.call("execute", rows, output.stage, output.iteration, key, *more, reads=reads)
        output.begin(key, group, futures, parts)

    def _begin_deferred(self, outputs: Iterable[Output]) -> None:
        """Start the deferred stages: on the driver if a stage reads and writes only index columns, otherwise on the
        workers with its rows.
        """
        for output in outputs:
            if not (output.index is None and not output.futures):
                continue
            stage, table = output.stage, output.table
            assert table is not None
            group, parts = self._locate(stage, table)
            totals, columns = None, dict[str, Column]()
            if stage.scope is Scope.BATCH:
                totals = self._totals(stage, table, group, parts, output.iteration)
            if group is None and len(table):
                with traced(self.trace, "compute", stage.name, output.iteration, rows=len(table)):
                    columns = computed(stage, table.index, totals)
            if columns and all(isinstance(column, Tensor) for column in columns.values()):
                output.index, output.table = Rows(columns), None
            else:
                self._begin(output, group, parts, totals)

    def _totals(
        self, stage: Stage, table: Handle, group: WorkerGroup | None, parts: Partition, iteration: int = 0
    ) -> dict[str, Tensor]:
        """Return a stage's sums over all rows, computed by the workers that hold them."""
        if group is None:
            return summed(stage, table.index)
        called = group.call("sums", replace(table, parts=parts), stage, iteration, reads=columns_read(stage))
        totals: dict[str, Tensor] = {}
        for answer in group.wait(called):
            for name, value in (answer.result or {}).items():
                totals[name] = totals[name] + value if name in totals else value
        return totals

    def _wait(self, outputs: Sequence[Output]) -> None:
        """Start the deferred outputs among these, then wait for all of them."""
        self._begin_deferred(outputs)
        for output in outputs:
            if output.index is None:
                output.finish(self._answers(output))

    def _answers(self, output: Output) -> list[CallResult]:
        """Wait for a stage, show its progress, and add its sums."""
        name = output.stage.name
        with self.progress.stage(name, sum(len(future.part) for future in output.futures)) as bar:
            answers = output.group.wait(output.futures, lambda future: bar.update(len(future.part)))
        # Sum over ranks first: the result is then independent of earlier counts.
        output.sums.merge(Sums().merge(*(Sums(answer.sums) for answer in answers)))
        output.sums.add(f"time/{name}", max((answer.seconds for answer in answers), default=0.0))
        return answers


def start_hybrid_backend(
    prepared: Prepared, progress: Progress, folder: Path | None, cluster: RayCluster | None = None
) -> HybridBackend:
    """Start the workers, on the configured cluster by default, and let them read the data and load their models.

    `folder` is the run's, for files of workers. Raises UserError if a placement, the data or a user's class cannot be
    used.
    """
    config = prepared.config
    for role_config in config.roles.values():
        if role_config.methods:
            import_function(role_config.methods)
    pools = prepared.deployment.pools
    with ExitStack() as resources:
        cluster = cluster or RayCluster(config.cluster, config.device)
        resources.callback(cluster.close)
        groups, number = list[WorkerGroup](), 0
        for pool, reservations in zip(pools, cluster.reserve(pools), strict=True):
            groups.append(WorkerGroup(pool, reservations, number, cluster))
            number += len(reservations)
        first = next(iter(prepared.deployment.generating), None)
        home = next((group for group in groups if first in group.pool.generating), groups[0])
        settings = config.model_dump(mode="json", exclude_unset=True)
        order = RunOrder(settings, prepared.train, folder.resolve() if folder else None, cluster.family)
        workers = RunWorkers(groups, home, prepared, order)
        counts, admissions = workers.begin(groups), None
        for _, report, _ in counts:
            progress.print(report)
        if counts:
            weights = [source.weight for source in config.data.train]
            curriculum = curriculum_of(config, [units for _, _, units in counts])
            sizes = [kept for kept, _, _ in counts]
            admissions = Admissions(sizes, weights, config.seed, config.data.shuffle, curriculum)
        trace = TraceWriter(folder, "controller") if folder else None
        if trace is not None:
            resources.callback(trace.close)
        return HybridBackend(admissions, workers, progress, resources.pop_all(), trace)


def written(group: WorkerGroup, actors: Sequence[Any]) -> None:
    """Wait until the workers have written their copies; `actors` are the workers at the time of copying.

    Raises OSError if a worker could not write, and WorkerError if one has died or the group was restarted since.
    """
    if group.actors is not actors:
        raise WorkerError(f"{group.pool.name} was started again while it wrote a checkpoint")
    for answer in group.wait(group.call("written", aside=True)):
        check_written(answer.result)
