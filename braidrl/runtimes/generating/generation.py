"""Generation and verification in one process: holds the engines of its roles and the reward processes.

rows ──requests_of──▶ engine ──finished rows──▶ EarlyChecks, EarlyStop ──▶ columns
     ──play────────▶ episodes on the same engine ─────────────────────▶
trained weights ──publish──▶ engines
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from braidrl.agents.trajectory import Limits, Trajectory, response_columns, trajectory_columns, with_oldest_version
from braidrl.agents.turns import EnvironmentFailed
from braidrl.algorithms.policy_metrics import reflection_counts
from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.world import Ranks
from braidrl.config import Config
from braidrl.data.rows import Column, FinishReason, Rows, Uid
from braidrl.data.token_columns import VERSIONS, returned_columns
from braidrl.data.vision import moved
from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.engines.factory import exchange_publisher, publisher_of, start_engine
from braidrl.engines.requests import Request, Response
from braidrl.engines.routing.router import RoleEngine, run_together
from braidrl.errors import UserError
from braidrl.flow import Stage
from braidrl.flow.flow import policies_of
from braidrl.flow.signatures import columns_of, namespaces_of
from braidrl.observe.metrics import FAILURE, Sums
from braidrl.observe.progress import Progress
from braidrl.observe.trace import Span, TraceWriter
from braidrl.rewards.verify import LEFT_OUT, RuleRewards, decoded
from braidrl.runtimes.generating.episodes import Episodes, limits_of, sampling_of
from braidrl.runtimes.generating.partial import PartialResponses
from braidrl.runtimes.generating.verification import Checks, EarlyChecks, EarlyStop, early_verify_stages
from braidrl.runtimes.prepare.run_data import Prepared
from braidrl.runtimes.usage import DeviceUsage, Drawn
from braidrl.training.backends import ShardedBackend, TrainingBackend
from braidrl.training.decoders.images import ModelImages
from braidrl.training.parallel.layouts import DataParallel
from braidrl.weights.publisher import Publisher, TransferVolume

UNDRAWN = "undrawn"
"""Parameter of a generate stage: the rows that are left out, because processes have ended with them."""


class WeightMoves:
    """Records of weight transfers to another layout: trace spans, and numbers for the next stage's metrics."""

    def __init__(self) -> None:
        self.trace: TraceWriter | None = None
        self.version = 0
        self.sums = Sums()
        """The numbers since the last stage, whose metrics take them."""

    def note(self, role: str, moved: TransferVolume | None) -> None:
        """Record one transfer of a role's weights; None, or no rounds, if nothing moved."""
        if moved is None or not moved.rounds:
            return
        for name in ("received", "rounds", "seconds"):
            self.sums.add(f"weights/{role}/{name}", getattr(moved, name))
        if self.trace is not None:
            end = self.trace.now()
            self.trace.record(Span(self.trace.worker, role, "weights", self.version + 1, end - moved.seconds, end))


def images_seen(engine: RoleEngine) -> ModelImages | None:
    """Return the images of an engine in this process; None for a text-only or remote engine."""
    return engine.images if isinstance(engine, EmbeddedEngine) else None


class Generation:
    """The engines of generating roles, by role, and the running checks."""

    def __init__(self, prepared: Prepared, progress: Progress, ranks: DataParallel, checks: bool) -> None:
        """Start without engines; `ranks` are the processes that generate a batch together.

        Without `checks` this process verifies no answers.
        """
        config, self.flow, self.tokenizer = prepared.config, prepared.deployment.flow, prepared.tokenizer
        self.config, self.progress, self.ranks = config, progress, ranks
        self.vision = prepared.vision
        self.deployment = prepared.deployment
        self.checks = Checks(prepared.rewards() if checks else None, progress)
        self.engines: dict[str, RoleEngine] = {}
        self.publishers: dict[str, Publisher] = {}
        self.moves, self.usage = WeightMoves(), DeviceUsage(config, prepared.deployment.engines)
        self.episodes = Episodes(prepared)

    def start_engine(self, role: str, worker: TrainingBackend | None) -> None:
        """Start the engine that generates with the weights of `worker`; without a worker, `exchange_weights` names the
        trainer later.
        """
        ranks = self.ranks if worker is None else worker.ranks
        engine = start_engine(role, ranks, worker, self.deployment, self.tokenizer, self.engines)
        self.engines[role] = engine
        if worker is not None:
            self.publishers[role] = publisher_of(worker, engine, self.deployment)

    def exchange_weights(self, role: str, worker: TrainingBackend | None, ranks: DataParallel) -> None:
        """Plan the transfer of a role's weights between all `ranks` that train it, with a `worker`, or generate; all
        call this together.
        """
        trained = worker if isinstance(worker, ShardedBackend) else None
        if role in self.publishers:
            self.publishers[role].close()
        self.publishers[role] = exchange_publisher(trained, self.engines.get(role), self.deployment, ranks)

    def regroup(self, workers: Mapping[str, TrainingBackend]) -> None:
        """Make publishers for the ranks after a change; all of them call this together."""
        for role, publisher in list(self.publishers.items()):
            publisher.close()
            self.publishers[role] = publisher_of(workers[role], self.engines[role], self.deployment)

    def generate(self, stage: Stage, rows: Rows, sums: Sums, stop: EarlyStop | None = None) -> Mapping[str, Column]:
        """Return the columns that a generate stage writes, in the order of `rows`; without rows only collective
        decoding is done.
        """
        if "environment" in stage.params:
            return self._play(stage, rows, sums, stop)
        engine = self.engines[str(stage.role)]
        if not len(rows):
            self._draw(stage, [], lambda response: None, stop, sums)
            if stop is not None:
                stop.close()
            return {}
        if self.vision is not None and "images" not in rows:
            raise UserError(
                f"{stage.name}: the model takes images, and its rows have no column `images`; a session under "
                "runtime=hybrid does not carry them: write runtime=eager"
            )
        requests = requests_of(stage, rows, self.config)
        position = {uid: i for i, uid in enumerate(rows.uids())}
        # Greedy decoding gives all samples of a prompt the same tokens: only one is generated.
        greedy = sampling_of(stage, self.config).takes_likeliest
        leader: dict[tuple[int, int], Uid] = {}
        undrawn = self._all_undrawn(stage, rows)
        first = {uid: leader.setdefault(uid[:2], uid) if greedy and uid not in undrawn else uid for uid in position}
        requests = [request for request in requests if first[request.uid] == request.uid and request.uid not in undrawn]
        partial = self.partial(stage, rows, self.moves.version)
        requests = partial.rest(requests) if partial else requests
        # Answers of a suspended group need no checks yet.
        verify = [] if partial else early_verify_stages(self.flow, stage)
        with self.progress.stage(stage.name, len(rows)) as bar:
            early = EarlyChecks(self.checks, engine, rows, position, verify, bar, stop)
            if stop is not None:
                stop.bar = bar

            def ended(response: Response) -> None:
                complete = partial.joined(response, engine.max_sequence_tokens) if partial else response
                done[response.uid] = complete
                early.add(complete)

            done = dict(partial.complete) if partial else {}
            done |= {uid: response for uid, response in undrawn.items() if isinstance(response, Response)}
            drawn = self._draw(stage, requests, ended, stop, sums)
            done |= {response.uid: response for response in drawn if response.uid not in done}
            finished = [done[uid] if uid in done else replace(done[source], uid=uid) for uid, source in first.items()]
            for copy in finished:
                if copy.uid not in done:
                    early.add(copy)
            early.flush()
            if stop is not None:
                stop.close()
        return self.named(stage.params.get("into"), response_columns(rows, finished, columns_of(stage)))

    def _draw(
        self,
        stage: Stage,
        requests: Sequence[Request],
        ended: Callable[[Response], None],
        stop: EarlyStop | None,
        sums: Sums,
    ) -> list[Response]:
        """Return the responses of requests, in their order; ranks that share a `stop` generate waiting rows of each
        other.

        `ended` is called with each response that ends without being stopped.
        """
        engine, loans = self.engines[str(stage.role)], None if stop is None else stop.loans
        changes = stop.changes if stop is not None and (loans is not None or stop.segment is not None) else None

        def finished(response: Response) -> None:
            if loans is None or not loans.ended(response):
                ended(response)

        if loans is not None:
            loans.open(engine, requests, ended)
        start = time.perf_counter()
        drawn = engine.generate(requests, finished, changes)
        generated = [*zip(requests, drawn, strict=True), *(loans.drawn if loans is not None else ())]
        new = Drawn.after([len(request.prompt) for request, _ in generated], [response for _, response in generated])
        self.usage.decoded(stage, new, engine.slots, time.perf_counter() - start, sums)
        self.usage.speculated(stage, engine.speculated, sums)
        self.usage.encoded(stage.name, images_seen(engine), len(generated), sums)
        return drawn if loans is None else [loans.returned.get(response.uid, response) for response in drawn]

    def partial(self, stage: Stage, rows: Rows, version: int) -> PartialResponses | None:
        """Return the earlier tokens of rows if responses may be suspended; `version` of the weights continues them."""
        if self.config.rollout.tokens_per_iteration is None or VERSIONS not in rows:
            return None
        return PartialResponses(stage, rows, self.config, version)

    def _play(self, stage: Stage, rows: Rows, sums: Sums, stop: EarlyStop | None = None) -> Mapping[str, Column]:
        """Play trajectories in the stage's environment; environment failures are counted and the first is shown.

        If there are more ranks than concurrent episodes, ranks play in turn.
        """
        engines = {role: self.engines[role] for role in policies_of(stage)}
        engine = engines[str(stage.role)]
        if not len(rows) and not any(e.is_collective for e in engines.values()):
            return {}
        limits = limits_of(self.config, engine.max_sequence_tokens, self.ranks)
        with self.progress.stage(stage.name, len(rows)) as bar:
            if stop is not None:
                stop.bar = bar
                stop.wait_for_turn(self.config.rollout.environment.at_once, Ranks(engine.group))

            def finished(ended: Trajectory) -> None:
                drawn = sum(t.action_tokens for t in ended.every)
                bar.update(1, drawn, sum(e.in_flight for e in set(engines.values())))
                if stop is not None:
                    stop.count(drawn)

            start, undrawn = time.perf_counter(), self._all_undrawn(stage, rows)
            drawn = [position for position, uid in enumerate(rows.uids()) if uid not in undrawn] if undrawn else None
            started_rows = rows if drawn is None else rows.take(drawn)
            played = run_together(
                engines,
                lambda running: self.episodes.played(
                    running, stage, started_rows, limits, finished, self.moves.version
                ),
            )
            self.usage.decoded(stage, Drawn.played(played), engine.slots, time.perf_counter() - start, sums)
            self.usage.speculated(stage, engine.speculated, sums)
            self.usage.encoded(stage.name, images_seen(engine), len(played), sums)
            if stop is not None:
                stop.close()
            if not len(rows):
                return {}
            result_of = undrawn | dict(zip(started_rows.uids(), played, strict=True))
            every = [one for uid in rows.uids() if isinstance(one := result_of[uid], Trajectory)]
            return self.trajectory_columns(stage, every, limits, sums)

    def _all_undrawn(self, stage: Stage, rows: Rows) -> dict[Uid, Response | Trajectory]:
        """Return the results of the rows that a stage skips."""
        left_out = stage.params.get(UNDRAWN)
        if not left_out or not len(rows):
            return {}
        positions = {uid: position for position, uid in enumerate(rows.uids()) if uid in left_out}
        return {uid: self.undrawn(stage, rows.take([position])) for uid, position in positions.items()}

    def undrawn(self, stage: Stage, row: Rows) -> Response | Trajectory:
        """Return the result of a row that is skipped because processes died with it, without generation or checks."""
        (uid,) = row.uids()
        self.checks.left_out.add(uid)
        nothing = self.no_tokens(stage)
        if "environment" not in stage.params:
            return Response(uid, torch.empty(0, dtype=torch.int64), FinishReason.ERROR, nothing)
        trajectory = Trajectory(uid, other_policies={role: Trajectory(uid) for role in policies_of(stage)[1:]})
        for of_policy in trajectory.every:
            of_policy.per_token = dict(nothing)
            of_policy.append(row["prompt"][0].tolist(), opens=True, images=moved((row.get("images") or [()])[0], 0))
        trajectory.fail(EnvironmentFailed("died", LEFT_OUT))
        return trajectory

    def no_tokens(self, stage: Stage) -> dict[str, Tensor]:
        """Return the columns per token of a row without any, of the types that the engine gives."""
        engine = self.engines[str(stage.role)]
        drawn_in = engine.model.dtype if isinstance(engine, EmbeddedEngine) else torch.float32
        dtype = torch.promote_types(drawn_in, torch.float32)
        return {column.name: column.empty(dtype) for column in returned_columns(columns_of(stage))}

    def trajectory_columns(
        self, stage: Stage, played: Sequence[Trajectory], limits: Limits, sums: Sums
    ) -> Mapping[str, Column]:
        """Return the columns that a generate stage writes; turns and failures are counted, and the first failure of
        each kind is shown.
        """
        # A suspended episode counts when it has ended.
        ended = [episode for episode in played if episode.finish_reason is not FinishReason.ABORT]
        if ended:
            turns = sum(trajectory.turns for episode in ended for trajectory in episode.every)
            sums.add("environment/turns", turns, len(ended))
        failures = Counter(episode.failure for episode in played if episode.failure is not None)
        if again := sum(episode.attempt for episode in played):
            sums.add("environment/played_again", again)
        if ended:
            sums.add("environment/failed_fraction", sum(failures.values()), len(ended))
        for reason, count in failures.items():
            first = next(episode for episode in played if episode.failure == reason)
            words = (
                f"{stage.name}: {count} of {len(played)} trajectories ended by {reason}; row {first.uid}: "
                f"{first.detail}"
            )
            sums.add(f"environment/failures/{reason}", count)
            sums.add(FAILURE + words, 0.0, count)
            self.progress.print(words)
        columns, sees = dict[str, Column](), self.vision is not None
        for number, into in enumerate(namespaces_of(stage.params)):
            trajectories = [episode.every[number] for episode in played]
            for trajectory in trajectories:
                # A rank where no row has tokens of a role writes the same types as the other ranks.
                trajectory.per_token = trajectory.per_token or self.no_tokens(stage)
            columns |= self.named(into, trajectory_columns(trajectories, limits, columns_of(stage), sees))
        # A row's version is that of the oldest token of its episode.
        return with_oldest_version(columns) if policies_of(stage)[1:] else columns

    def named(self, into: str | None, columns: Mapping[str, Column]) -> Mapping[str, Column]:
        """Return the generated columns in a namespace, and each row's count of reflection phrases."""
        tokens, mask = columns["tokens"], columns["action_mask"]
        assert isinstance(tokens, Ragged) and isinstance(mask, Ragged)
        reflections = torch.zeros(len(tokens), dtype=torch.int64)
        if phrases := self.config.rollout.reflection_phrases:
            responses = decoded(self.tokenizer, tokens.where(mask.values).tolist(), True)
            reflections = reflection_counts(responses, phrases)
        return {f"{into}.{n}" if into else n: c for n, c in {**columns, "reflections": reflections}.items()}

    def publish(self, version: int) -> None:
        self.moves.version = version
        for role, publisher in self.publishers.items():
            start = time.perf_counter()
            self.moves.note(role, publisher.publish(version))
            self.moves.sums.add(f"weights/{role}/update_seconds", time.perf_counter() - start)

    def release_rewards(self) -> RuleRewards | None:
        """Return the verifiers, whose processes then outlive these engines."""
        rewards, self.checks.rewards = self.checks.rewards, None
        return rewards

    def close(self) -> None:
        # The event loop is that of the first engine; policies may share an engine.
        for engine in reversed(dict.fromkeys(self.engines.values())):
            engine.close()
        for publisher in self.publishers.values():
            publisher.close()
        self.episodes.close()
        if self.checks.rewards is not None:
            self.checks.rewards.close()


def requests_of(stage: Stage, rows: Rows, config: Config) -> list[Request]:
    """Return a generate stage's requests to its engine, one per row."""
    sampling, purpose = sampling_of(stage, config), str(stage.params.get("purpose", "train"))
    prompts = rows["prompt"].unbind()
    columns, images = columns_of(stage), rows.get("images") or [()] * len(rows)
    return [
        Request(
            uid, ids, sampling, purpose, stage.name, columns=columns, images=tuple(moved(spans, 0)), policy=stage.role
        )
        for uid, ids, spans in zip(rows.uids(), prompts, images, strict=True)
    ]
