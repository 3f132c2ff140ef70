"""What a generate stage asks of an engine: one request per row, and how it samples."""

from __future__ import annotations

from collections.abc import Sequence

from braidrl.config import Config
from braidrl.data.rows import Rows
from braidrl.flow import Stage
from braidrl.rollout.requests import Request, SamplingParams, Uid


def requests_of(stage: Stage, rows: Rows, config: Config) -> list[Request]:
    """What a generate stage asks of its engine, one request per row."""
    sampling, purpose, prompts = sampling_of(stage, config), str(stage.params.get("purpose", "train")), rows["prompt"]
    return [Request(uid, prompts[i], sampling, purpose, stage.name) for i, uid in enumerate(rows.uids())]


def sampling_of(stage: Stage, config: Config) -> SamplingParams:
    """How a generate stage samples: the configuration's `rollout`, where the stage does not say otherwise."""
    rollout, params = config.rollout, stage.params
    return SamplingParams(
        temperature=params.get("temperature", rollout.temperature),
        top_p=params.get("top_p", rollout.top_p),
        top_k=params.get("top_k", rollout.top_k),
        max_tokens=rollout.max_response_tokens,
        stop_token_ids=tuple(rollout.stop_token_ids),
        stop=tuple(rollout.stop),
        greedy=bool(params.get("greedy", False)),
    )


def leaders(uids: Sequence[Uid]) -> dict[Uid, Uid]:
    """For each row the first one of its prompt."""
    first: dict[tuple[int, int], Uid] = {}
    return {uid: first.setdefault(uid[:2], uid) for uid in uids}
