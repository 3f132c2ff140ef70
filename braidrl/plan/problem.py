"""A planning problem: a flow with its models, row lengths and devices, and the cost of each stage in a layout.

configuration + flow + Lengths + Cluster + Rates ──▶ Problem ──stage_cost──▶ Cost
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from braidrl.cluster.device_kinds import Cluster, NodeGroup
from braidrl.config import Config
from braidrl.config.layout import ParallelLayout
from braidrl.data.prompts import LoadedSource
from braidrl.data.tables import RESPONSES
from braidrl.engines.deployment import Deployment
from braidrl.errors import UserError
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.flow import is_optimized, policies_of
from braidrl.observe.metrics import read_metrics
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import recorded_steps, rollout_path
from braidrl.plan.rates import BUILT_IN, Cost, Rates, RuntimeRates, Work, price
from braidrl.plan.work import IntArray, Lengths, generate_work, infer_work, share_received, train_work
from braidrl.runtimes.memory.budget import EngineUse, RoleDeployment, RoleUse, undeployed
from braidrl.runtimes.prepare.deployment import deploy
from braidrl.training.acceptance import check_plan
from braidrl.training.role_settings import settings_of, slots_of
from braidrl.weights.generation_layout import GenerationLayout

USABLE = 0.92
"""Share of a device's memory that a plan uses; allocators and communication libraries need the rest."""
ROW_MULTIPLE = 16
"""The embedded engine on a CPU pads its rows to a multiple of this."""
EXAMINED = 1000
"""Prompts of a source whose images are counted."""
COMPUTED = ("advantage.", "shape.", "select.", "data.")
"""Prefixes of built-in functions, which take milliseconds for any batch."""


@dataclass(frozen=True)
class Model:
    """A role's model and its stages in the flow."""

    role: str
    dtype: str
    use: RoleDeployment
    """Its deployment before a layout is chosen, without an engine and without recomputation."""
    stages: tuple[Stage, ...]
    generates: bool
    infers: bool


@dataclass(eq=False)
class Problem:
    """The problem.

    `seconds` gives the seconds per iteration of stages by name, for stages that cannot be derived. Its configuration is
    that of a run on the cluster: a role's dtype and an engine's weights depend on the device. Its `rates` are completed
    by those of all of the cluster's kinds.
    """

    config: Config
    flow: Flow
    cluster: Cluster
    lengths: Lengths
    rates: Mapping[str, Rates] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    _generation: dict[Any, Cost] = field(default_factory=dict, init=False, repr=False)
    _allowed: dict[Any, bool] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.config = self.config.model_copy(update={"device": self.cluster.device})
        self.rates = {kind: self.rates.get(kind) or BUILT_IN.get(kind) or Rates() for kind in self.cluster.kinds}
        trainer = self.config.trainer
        self.rows = trainer.prompts_per_step * self.config.rollout.samples_per_prompt
        self.updates = -(-self.rows // (trainer.rows_per_update or self.rows))
        """The number of optimizer steps in one pass over a batch."""

    @cached_property
    def deployment(self) -> Deployment:
        """Return the deployment of the configured run."""
        return deploy(self.config, self.flow)

    @cached_property
    def models(self) -> dict[str, Model]:
        """Return the roles that need a model, in order of first use."""
        shapes = {}
        for role in self.flow.roles:
            stages = tuple(
                stage
                for stage in self.flow.stages
                if role in (stage.role, *policies_of(stage)) and stage.type != "verify"
            )
            kinds = {stage.kind for stage in stages}
            use = undeployed(RoleUse(role, role in self.flow.trained_roles, False), self.deployment)
            use = replace(use, checkpointing=False)
            dtype = settings_of(role, self.config).dtype_name
            shapes[role] = Model(role, dtype, use, stages, Kind.GENERATE in kinds, Kind.INFER in kinds)
        return shapes

    def splits(self, sets: Sequence[Sequence[str]]) -> bool:
        """Return True if roles that play together are in several of these sets of roles."""
        playing = [set(policies_of(stage)) for stage in self.flow.stages if stage.kind is Kind.GENERATE]
        return any(0 < len(together.intersection(roles)) < len(together) for together in playing for roles in sets)

    def with_runtime(self, runtime: str, seconds: float) -> float:
        """Return the seconds of an iteration, with the runtime's overhead added to those of its stages."""
        rates = self.rates[self.cluster.groups[0].kind].runtimes.get(runtime, RuntimeRates())
        return rates.iteration_s + rates.row_s * self.rows + (1 + rates.slower) * seconds

    def check_stages(self) -> None:
        """Raise UserError for a stage without a known cost, with the option that gives it."""
        calibrated = {name for group in self.cluster.groups for name in self.rates[group.kind].stages}
        for stage in self.flow.stages:
            plays, engine, what = "environment" in stage.params, self.config.rollout.engine, "is a function of yours"
            derived = stage.role is not None or stage.type.startswith(COMPUTED)
            if stage.kind is Kind.GENERATE:
                what = "plays in an environment" if plays else f"is done by {engine}"
                derived = not plays and engine in ("embedded", "vllm", "http")
            if not (derived or stage.name in self.seconds or stage.type in calibrated):
                raise UserError(
                    f"{stage.name} {what}, whose time cannot be derived; give its seconds per iteration as in "
                    f"--seconds {stage.name}=2.5, or calibrate with a run that has it"
                )

    def rows_of(self, stage: Stage) -> Lengths:
        """Return the rows of a stage; before selection these are all sampled rows."""
        if self.lengths.generated > 1 and stage in self.flow.sampling_segment and stage.kind is not Kind.GENERATE:
            more = int(self.lengths.generated * len(self.lengths))
            picks = [i % len(self.lengths) for i in range(more)]
            return Lengths(self.lengths.prompts[picks], self.lengths.responses[picks], seen=self.lengths.seen)
        return self.lengths

    def stage_cost(
        self, role: str, stage: Stage, use: RoleDeployment, group: NodeGroup, devices: int, apart: bool = False
    ) -> Cost:
        """Return the cost of a role's stage on `devices` devices of a group; `apart` if engines have separate
        devices.

        A role that plays in another's stage adds the publication of its weights: its turns are in the stage's time.
        """
        if role != stage.role:
            is_published = role in self.flow.changed_roles
            return Cost(weights=self.publication_seconds(use, group, apart)) if is_published else Cost()
        if stage.name in self.seconds:
            return Cost(overhead=self.seconds[stage.name])
        model, kind, rates = self.models[str(stage.role)], self.cluster.kinds[group.kind], self.rates[group.kind]
        if stage.kind is Kind.TRAIN and not is_optimized(stage):
            return Cost(memory=3 * model.use.shape.parameters * 4 / kind.bandwidth)
        # Many training layouts share an engine configuration: simulate its generation once.
        engine = use.engine and (use.engine.divisor, use.engine.slots, use.engine.shape.dtype)
        key = (model.role, group.kind, devices, engine)
        cost = self._generation.get(key) if stage.kind is Kind.GENERATE else None
        if cost is None:
            cost = Cost()
            for work in self.works(stage, use, group, devices):
                cost = cost.plus(price(work, kind, rates, model.dtype, self.config.rollout.engine))
        if stage.kind is Kind.GENERATE:
            self._generation[key] = cost
            return cost.plus(Cost(weights=self.publication_seconds(use, group, apart)))
        if stage.kind is Kind.INFER and use.inference is not None:
            target = GenerationLayout(use.inference.pipeline, use.inference.tensor, None)
            moved = model.use.plain.parameters * model.use.plain.element_bytes * share_received(use.layout, target)
            cost = cost.plus(Cost(weights=moved / (kind.link * rates.link)))
        return cost

    def works(self, stage: Stage, use: RoleDeployment, group: NodeGroup, devices: int) -> list[Work]:
        """Return the work of a model's stage on its busiest device; generation returns prefill and decode."""
        model, node, config = self.models[str(stage.role)], group.devices, self.config
        if stage.kind is Kind.GENERATE:
            # There is one server per address, with vLLM's default settings.
            engine = use.engine or EngineUse(model.use.shape, slots_of(config), 0)
            replicas = max(1, devices // engine.divisor if use.engine else len(config.rollout.servers.urls))
            multiple = ROW_MULTIPLE if self.cluster.device == "cpu" and config.rollout.engine == "embedded" else 1
            samples = config.rollout.samples_per_prompt
            shape, ranks, slots = engine.shape, engine.divisor, engine.slots
            return [*generate_work(shape, ranks, replicas, self.lengths, slots, samples, node, multiple)]
        lengths, tokens = self.rows_of(stage), use.tokens
        if self.deployment.mode.concurrent:
            # A micro-batch cannot exceed one dispatch.
            rows = config.streaming.dispatch_rows * use.layout.ranks_per_replica
            tokens = min(tokens, math.ceil(rows * lengths.tokens / len(lengths)))
        if stage.kind is Kind.INFER:
            layout, samples = use.inference or use.layout, config.rollout.samples_per_prompt
            return [infer_work(model.use.plain, layout, lengths, tokens, model.use.scalar, node, samples)]
        return [
            train_work(
                model.use.shape,
                use.layout,
                lengths,
                tokens,
                use.checkpointing,
                model.use.scalar,
                node,
                self.updates,
                config.trainer.epochs,
                settings_of(model.role, config).trains_vision,
            )
        ]

    @property
    def publishes_files(self) -> bool:
        """Return True if engines outside the trainer read weights from files in host memory."""
        return self.cluster.device == "cpu" or self.config.rollout.weights == "file"

    def publication_seconds(self, use: RoleDeployment, group: NodeGroup, apart: bool) -> float:
        """Return the seconds of a weight update; 0 if engines share the trainer's weights.

        Ranks that generate receive the slices that they lack. Engines on other devices receive full weights: by a
        process group between CUDA devices, otherwise from a file in host memory.
        """
        engine, kind, rates = use.engine, self.cluster.kinds[group.kind], self.rates[group.kind]
        if engine is None:
            written = use.plain.parameters * use.plain.element_bytes
            return 2 * written / (kind.host * rates.host)
        if not (engine.own_weights or apart):
            return 0.0
        size, link = engine.shape.element_bytes, kind.link * rates.link
        network, host = kind.network * rates.network, kind.host * rates.host
        if apart:
            moved = engine.shape.parameters * size / engine.divisor
            if self.publishes_files:
                return 2 * moved / host
            return moved / (link if self.cluster.size <= group.devices else network)
        moved = engine.shape.parameters * size * share_received(use.layout, self.generation(engine.divisor))
        sharing = use.layout.ranks_per_replica * (1 if use.layout.shard == "none" else use.layout.data or 1)
        return moved / (link if sharing <= group.devices else network)

    def generation(self, divisor: int) -> GenerationLayout:
        """Return the layout of engines of `divisor` ranks: as configured, or tensor-parallel alone."""
        configured = self.deployment.engines.layout
        return configured if divisor == configured.ranks else GenerationLayout(1, divisor, configured.grouping)

    def allows(self, role: str, layout: ParallelLayout) -> bool:
        """Return True if a run can shard the role's model by this layout."""
        axes = (role, layout.pipeline > 1, layout.tensor > 1, layout.token_ranks > 1, layout.shard != "none")
        if axes not in self._allowed:
            try:
                check_plan(settings_of(role, self.config).model, layout, "layout")
            except UserError:
                self._allowed[axes] = False
        return self._allowed.setdefault(axes, True)


def batch_lengths(config: Config, lengths_given: str | None = None, sources: Sequence[LoadedSource] = ()) -> Lengths:
    """Return the lengths of one batch's rows. Raises UserError if they cannot be parsed, or the run recorded none.

    `lengths_given` is a run's folder, whose recorded lengths are used; TOKENS for every response; or MEDIAN:LONGEST
    of a log-normal distribution. By default prompts have the lengths of the data, and responses the longest.
    """
    rows = config.trainer.prompts_per_step * config.rollout.samples_per_prompt
    if lengths_given is not None and Path(lengths_given).is_dir():
        run = Path(lengths_given)
        steps = recorded_steps(run)
        if not steps:
            raise UserError(f"--lengths {run}: the run recorded no rollouts")
        # Use the last half: response lengths change during training.
        parts = [step_lengths(run, step) for step in steps[len(steps) // 2 :]]
        prompts, responses = (np.concatenate(column) for column in zip(*parts, strict=True))
        picked = spread(responses, rows)
        lines, trained = read_metrics(run), len(parts[0][0])
        generated = np.mean([line.get("rows/generated", trained) for line in lines]) / trained if lines else 1.0
        return Lengths(prompts[picked], responses[picked], max(1.0, float(generated)), tokens_seen(sources))
    names = ("prompt", *RESPONSES)
    columns = {name: [column.numpy() for s in sources if (column := s.lengths(name)) is not None] for name in names}
    prompts = np.concatenate(columns["prompt"] or [np.array([config.data.max_prompt_tokens])]).astype(np.int64)
    if lengths_given is not None:
        form = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", lengths_given)
        median, longest = (int(form[1]), int(form[2] or form[1])) if form else (0, 0)
        if not 1 <= median <= longest:
            raise UserError(
                f"--lengths: {lengths_given!r} is no run folder and not TOKENS or MEDIAN:LONGEST, as in 300:2000"
            )
        responses = np.array([median])
        if longest > median:
            sigma = math.log(longest / median) / NormalDist().inv_cdf(1 - 1 / max(rows, 3))
            quantiles = [NormalDist().inv_cdf((i + 0.5) / rows) for i in range(rows)]
            drawn = [min(longest, int(median * math.exp(sigma * q))) for q in quantiles]
            responses = np.array([max(1, tokens) for tokens in drawn])
    else:
        responses_of = [lengths for name in RESPONSES for lengths in columns[name]]
        responses = np.concatenate(responses_of or [np.array([config.rollout.max_response_tokens])]).astype(np.int64)
    # Shuffle: lengths of prompts and responses are taken as independent.
    shuffled = np.random.default_rng(0).permutation(prompts[spread(prompts, rows)])
    return Lengths(shuffled, responses[spread(responses, rows)], config.trainer.over_sampling, tokens_seen(sources))


def tokens_seen(sources: Sequence[LoadedSource]) -> float:
    """Return the mean number of image tokens in a prompt, over the first prompts of each source."""
    image_tokens = [
        sum(span.tokens for span in (source.images(row) or [[]])[0])
        for source in sources
        if set(source.facts.images) - {"0"}
        for row in range(min(len(source), EXAMINED))
    ]
    return sum(image_tokens) / len(image_tokens) if image_tokens else 0.0


def step_lengths(run: Path, step: int) -> tuple[IntArray, IntArray]:
    """Return the lengths of a recorded step's prompts and responses."""
    rows = read_rollouts(rollout_path(run, step))
    prompts = np.asarray(rows["prompt_length"]).astype(np.int64)
    return prompts, np.asarray(rows["length"]).astype(np.int64) - prompts


def spread(lengths: IntArray, rows: int) -> IntArray:
    """Return the positions of `rows` lengths of the same distribution, ascending: midpoints, as not every batch has the
    longest row.
    """
    midpoints = ((np.arange(rows) + 0.5) * len(lengths) / rows).astype(np.int64)
    positions: IntArray = np.argsort(lengths, kind="stable")[midpoints]
    return positions
