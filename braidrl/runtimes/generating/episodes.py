"""Episodes of a generate stage: its environments, and the players that bring them and an engine together.

rows ──▶ Episodes.played ──environment──▶ EnvironmentPlayer ─┬─▶ trajectories
                         ──agents───────▶ AgentPlayer ───────┘
"""

import math
from collections.abc import Callable
from dataclasses import replace

from braidrl.agents.environments import AGENTS, in_thread
from braidrl.agents.keys import endpoint_key
from braidrl.agents.player import AgentPlayer, EnvironmentPlayer
from braidrl.agents.resuming import ResumingEpisodes
from braidrl.agents.sandboxed import EnvironmentHosts
from braidrl.agents.spans import EpisodeSpans
from braidrl.agents.trajectory import Limits, Trajectory, TurnSampling
from braidrl.agents.turns import TurnTemplate
from braidrl.config import Config
from braidrl.data.chat import end_ids_of
from braidrl.data.rows import Rows
from braidrl.data.templates import PromptTemplate
from braidrl.data.token_columns import VERSIONS
from braidrl.engines.engine import Engine
from braidrl.engines.requests import SamplingParams
from braidrl.flow import Stage
from braidrl.flow.flow import policies_of
from braidrl.flow.signatures import columns_of
from braidrl.runtimes.generating.partial import recorded_episodes
from braidrl.runtimes.prepare.run_data import Prepared
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.role_settings import settings_of


class Episodes:
    """The environments of this process, and the spans of their episodes."""

    def __init__(self, prepared: Prepared) -> None:
        self.config, self.tokenizer, self.vision = prepared.config, prepared.tokenizer, prepared.vision
        self.environments = EnvironmentHosts(self.config.rollout.environment)
        self.spans = EpisodeSpans(self.config.rollout.environment.spans)

    async def played(
        self,
        running: Engine,
        stage: Stage,
        rows: Rows,
        limits: Limits,
        finished: Callable[[Trajectory], None] = lambda trajectory: None,
        version: int = 0,
    ) -> list[Trajectory]:
        """Return a trajectory for each row, played on a running engine; `finished` is called with each one that ends.

        In partial rollout weights of `version` continue episodes.
        """
        if not len(rows):
            return []
        if self.config.rollout.tokens_per_iteration is not None and VERSIONS in rows:
            recorded = recorded_episodes(stage, rows, self.config, version)
            end_ids = end_ids_of(settings_of(str(stage.role), self.config).model.expanduser(), self.tokenizer)
            suspends = self.config.rollout.environment.resume == "replay"
            running = ResumingEpisodes(running, recorded, self.tokenizer, end_ids, limits.max_sequence_tokens, suspends)
        make = await in_thread(lambda: self.environments.find(stage.params["environment"]))
        prompts = PromptTemplate.of(self.tokenizer, self.config.data, self.vision)
        template = TurnTemplate(prompts, self.config.rollout.environment.tool_format)
        if not self.config.reward.skip_special_tokens and not stage.params["environment"].startswith(AGENTS):
            # Environments get the same text as verifiers. Clients of the endpoint get the same text as from other
            # servers of its protocol.
            ends = end_ids_of(self.config.model.expanduser(), self.tokenizer)
            pad = getattr(self.tokenizer, "pad_token_id", None)
            template = replace(template, hidden=frozenset(token for token in (*ends, pad) if token is not None))
        seed = self.config.seed
        turns = TurnSampling(
            sampling_of(stage, self.config),
            limits.max_sequence_tokens,
            str(stage.params.get("purpose", "train")),
            stage.name,
            columns_of(stage),
        )
        if stage.params["environment"].startswith(AGENTS):
            # Imported here: only agents need aiohttp, which is optional.
            from braidrl.agents.endpoint import Endpoint

            listener = await in_thread(lambda: self.environments.listener(stage.params["environment"]))
            host, key = self.config.rollout.environment.host, endpoint_key(self.config.rollout.environment)
            async with Endpoint(running, template, turns, host, listener, key) as endpoint:
                agents = AgentPlayer(endpoint, make, limits=limits, seed=seed, on_finished=finished, spans=self.spans)
                return await agents.play(rows)
        player = EnvironmentPlayer(
            running,
            make,
            template,
            turns,
            limits=limits,
            seed=seed,
            on_finished=finished,
            policies=policies_of(stage)[1:],
            role=str(stage.role),
            spans=self.spans,
        )
        return await player.play(rows)

    def close(self) -> None:
        """End the environments."""
        self.environments.close()
        self.spans.close()


def sampling_of(stage: Stage, config: Config) -> SamplingParams:
    """Return a generate stage's sampling settings: those of the stage, otherwise those of `rollout`."""
    rollout, params = config.rollout, stage.params
    settings = {name: params.get(name, getattr(rollout, name)) for name in ("temperature", "top_p", "top_k")}
    return SamplingParams(
        **settings,
        max_tokens=rollout.max_response_tokens,
        stop_token_ids=tuple(rollout.stop_token_ids),
        stop=tuple(rollout.stop),
        greedy=bool(params.get("greedy", False)),
    )


def limits_of(config: Config, max_sequence_tokens: int, ranks: DataParallel) -> Limits:
    """Return the limits of a trajectory of `tokens` tokens including the prompt; ranks that play together divide
    `at_once`.
    """
    environment, right = config.rollout.environment, config.reward.correct_score
    share = environment.at_once // ranks.size + (ranks.rank < environment.at_once % ranks.size)
    return Limits(
        max(1, share),
        environment.timeout_s,
        environment.max_turns,
        max_sequence_tokens,
        1.0 if right is None else right,
        config.reward.max_abs,
        math.inf if environment.episode_timeout_s is None else environment.episode_timeout_s,
        environment.retries,
    )
