"""A growing trajectory: append-only token ids, with the engine's columns per token, and its outcome; and the columns of
a generate stage, from trajectories or from single responses.

context ──▶ actions ──▶ observation ──▶ actions | context ──▶ actions          | a new sequence of the same row
"""

import hashlib
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from braidrl.agents.turns import EnvironmentFailed
from braidrl.algorithms.ragged import Ragged, observation_mask
from braidrl.data.rows import Column, FinishReason, Rows, Uid
from braidrl.data.token_columns import VERSIONS, TokenColumn, padded, returned_columns, token_columns
from braidrl.data.vision import ImageSpan, image_columns, moved
from braidrl.engines.engine import Engine
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.errors import UserError


@dataclass(frozen=True)
class Limits:
    """Limits of a trajectory, and the number of concurrent trajectories."""

    at_once: int
    timeout_s: float
    """Seconds for one `reset` or `step`."""
    max_turns: int
    max_sequence_tokens: int
    correct_score: float = 1.0
    """A trajectory with at least this score is correct, unless its environment says otherwise."""
    max_abs: float = math.inf
    """A score with a larger absolute value is a failure of the environment."""
    episode_timeout_s: float = math.inf
    """Seconds for all turns of an environment's trajectory, including those of the model."""
    retries: int = 0
    """Maximum number of replays of a failed trajectory."""


@dataclass(frozen=True)
class TurnSampling:
    """Settings with which an engine samples the turns of a generate stage."""

    params: SamplingParams
    max_sequence_tokens: int
    """Maximum tokens of a sequence; a turn is shortened to the remaining ones."""
    purpose: str = "train"
    stage: str = "generate"
    """Random numbers depend on the stage and the purpose."""
    columns: tuple[str, ...] = ()
    """Columns per token that the engine returns in addition to those of every response."""


@dataclass
class Trajectory:
    """A row's tokens and outcome; only `append` adds tokens."""

    uid: Uid
    tokens: list[int] = field(default_factory=list)
    """Token ids of all sequences, joined."""
    actions: list[bool] = field(default_factory=list)
    """True for each token that was sampled."""
    sequence_lengths: list[int] = field(default_factory=list)
    images: list[ImageSpan] = field(default_factory=list)
    """The images of some of the tokens."""
    turn_lengths: list[int] = field(default_factory=list)
    """The number of tokens sampled in each turn."""
    turn_starts: list[int] = field(default_factory=list)
    """The position in `tokens` of each turn's first token."""
    rewards: list[float] = field(default_factory=list)
    """The reward after each turn so far; turns after the last rewarded one have none yet."""
    per_token: dict[str, Tensor] = field(default_factory=dict)
    """The engine's columns: of the sampled tokens of all turns, or of all tokens of the row."""
    score: float = 0.0
    correct: bool | None = None
    finish_reason: FinishReason = FinishReason.STOP
    failure: str | None = None
    """`timeout`, or the name of the exception that the environment raised."""
    detail: str = ""
    killed: bool = False
    """True if the environment's process was killed externally."""
    attempt: int = 0
    """Failed attempts before this one."""
    other_policies: dict[str, "Trajectory"] = field(default_factory=dict)
    """The trajectories of the other policies in the same episode, by role."""
    idle: bool = False
    """True for a policy that took no turn of its episode."""

    @property
    def sequence(self) -> list[int]:
        """Return the tokens of the current sequence, the engine's next prompt."""
        return self.tokens[len(self.tokens) - self.sequence_lengths[-1] :]

    @property
    def sequence_images(self) -> list[ImageSpan]:
        """Return the images of the current sequence, counted from its first token."""
        start = len(self.tokens) - self.sequence_lengths[-1]
        return [span for span in moved(self.images, -start) if span.start >= 0]

    @property
    def every(self) -> list["Trajectory"]:
        """Return the trajectories of all policies of the episode, this one first."""
        return [self, *self.other_policies.values()]

    @property
    def turns(self) -> int:
        return len(self.turn_lengths)

    @property
    def action_tokens(self) -> int:
        """Return the number of sampled tokens, which is also the number of the row's used random numbers."""
        return sum(self.turn_lengths)

    def append(
        self,
        tokens: Sequence[int],
        *,
        per_token: Mapping[str, Tensor] | None = None,
        opens: bool = False,
        images: Sequence[ImageSpan] = (),
    ) -> None:
        """Append tokens to the current sequence, or to a new one if they open it; only sampled tokens have the engine's
        columns.

        Raises ValueError if lengths differ, a column is missing, or a sequence starts with an action. The trajectory is
        then unchanged.
        """
        if per_token is not None:
            read = self.sequence_lengths[-1] if self.sequence_lengths else 0
            expected = self.per_token or {column.name for column in returned_columns()}
            if missing := sorted(set(expected) - set(per_token)):
                raise ValueError(f"row {self.uid}: a turn without values of {', '.join(missing)}")
            for name, values in per_token.items():
                if len(values) != token_columns[name].entries(read, len(tokens)):
                    raise ValueError(f"row {self.uid}: {len(values)} entries of {name} for {len(tokens)} tokens")
            if opens or not self.sequence_lengths:
                raise ValueError(f"row {self.uid}: a sequence cannot begin with an action, since nothing predicts it")
        elif not opens and not self.sequence_lengths:
            raise ValueError(f"row {self.uid}: the first tokens must open a sequence")
        elif opens and not tokens:
            raise ValueError(f"row {self.uid}: a sequence must begin with at least one token")
        if opens:
            self.sequence_lengths.append(0)
        if per_token is not None:
            self.turn_starts.append(len(self.tokens))
        self.images += moved(images, len(self.tokens))
        self.tokens.extend(tokens)
        self.actions.extend([per_token is not None] * len(tokens))
        self.sequence_lengths[-1] += len(tokens)
        if per_token is not None:
            self.turn_lengths.append(len(tokens))
            for name, values in per_token.items():
                self.per_token[name] = self._continued(token_columns[name], values)

    def _continued(self, column: TokenColumn, values: Tensor) -> Tensor:
        """Return a column's values with those of the turn just appended."""
        earlier = self.per_token.get(column.name, values[:0])
        if column.alignment == "actions":
            return column.extended(earlier, values)
        start = sum(self.sequence_lengths[:-1])
        earlier = padded(earlier, max(len(earlier), start))
        return torch.cat([earlier[:start], column.extended(earlier[start:], values)])

    async def sample_turn(
        self,
        engine: Engine,
        ids: Sequence[int],
        turns: TurnSampling,
        *,
        opens: bool = False,
        images: Sequence[ImageSpan] = (),
        on_token: Callable[[int, int], None] | None = None,
        policy: str | None = None,
    ) -> list[int]:
        """Append `ids` and a turn that the engine samples after them, in a new sequence with `opens`; return the
        sampled tokens.

        `policy` is the role whose weights sample, if an engine has several. `on_token` is called with each sampled
        token's index in the turn, and its id. Raises UserError if there is no space for a token; then, as after an
        error of the engine, nothing is appended.
        """
        context = [*ids] if opens else [*self.sequence, *ids]
        spans = [*images] if opens else [*self.sequence_images, *moved(images, len(context) - len(ids))]
        room = turns.max_sequence_tokens - len(context)
        if room < 1:
            raise UserError(
                f"row {self.uid}: a context of {len(context)} tokens leaves no room for a response in a sequence of "
                f"{turns.max_sequence_tokens}; raise rollout.max_sequence_tokens"
            )
        sampling = replace(turns.params, max_tokens=min(turns.params.max_tokens, room))
        prompt, drawn = torch.tensor(context, dtype=torch.int64), self.action_tokens
        request = Request(
            self.uid,
            prompt,
            sampling,
            turns.purpose,
            turns.stage,
            drawn,
            columns=turns.columns,
            images=tuple(spans),
            on_token=on_token,
            policy=policy,
        )
        turn = await engine.submit(request)
        self.append(ids, opens=opens, images=images)
        self.append(turn.tokens.tolist(), per_token=turn.per_token)
        self.finish_reason = turn.finish_reason
        return turn.tokens.tolist()

    def end(self, reason: FinishReason) -> None:
        """Record why the episode ended, for every policy."""
        for trajectory in self.every:
            trajectory.finish_reason = reason

    def fail(self, failed: EnvironmentFailed) -> None:
        """Record the failure that ended the trajectory."""
        self.end(FinishReason.ERROR)
        self.failure, self.detail, self.killed = failed.reason, failed.detail, failed.killed

    def add_reward(self, reward: float, correct: bool | None, max_abs: float) -> None:
        """Add an observation's reward to the last turn, and record its verdict.

        Raises EnvironmentFailed for a score beyond the limit.
        """
        score = self.score + reward
        if not abs(score) <= max_abs:
            raise EnvironmentFailed("reward", f"the score is {score:g}, and reward.max_abs is {max_abs:g}")
        self.score = score
        if self.turns:
            self.rewards += [0.0] * (self.turns - len(self.rewards))
            self.rewards[-1] += reward
        self.correct = self.correct if correct is None else correct


def trajectory_columns(
    trajectories: Sequence[Trajectory], limits: Limits, columns: Sequence[str] = (), sees: bool = False
) -> dict[str, Column]:
    """Return the columns of a generate stage with an environment, in the order of `trajectories`; `columns` are named
    as in its requests. A model that `sees` has the column `images` too.

    `prompt` holds the tokens before the first action of the first sequence, and the whole sequence if it has no action.
    """
    prompts = []
    for trajectory in trajectories:
        end = trajectory.sequence_lengths[0]
        acted = trajectory.actions[:end]
        prompts.append(trajectory.tokens[: acted.index(True) if True in acted else end])
    generated = generated_columns(
        Ragged.from_rows([t.tokens for t in trajectories], torch.int64),
        Ragged.from_rows([t.actions for t in trajectories], torch.bool),
        Ragged.from_rows([t.sequence_lengths for t in trajectories], torch.int64),
        [t.per_token for t in trajectories],
        [t.finish_reason for t in trajectories],
        columns,
    )
    score = torch.tensor([t.score for t in trajectories], dtype=torch.float32)
    correct = [t.score >= limits.correct_score if t.correct is None else t.correct for t in trajectories]
    # The score of a failed trajectory, or of one without a turn, is meaningless for its actions and for its group's
    # prompt.
    counted = [t.finish_reason is not FinishReason.ERROR and not t.idle for t in trajectories]
    mask, sequences = generated["action_mask"], generated["sequence_lengths"]
    assert isinstance(mask, Ragged) and isinstance(sequences, Ragged)
    images = image_columns([t.images for t in trajectories]) if sees else {}
    observed = mask.with_values(observation_mask(mask, sequences).to(torch.int64))
    return {
        "prompt": Ragged.from_rows(prompts, torch.int64),
        "prompt_length": torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64),
        **generated,
        **images,
        "score": score,
        "correct": torch.tensor(correct, dtype=torch.float32),
        "reward": score.clone(),
        "statistics_mask": torch.tensor(counted, dtype=torch.float32),
        "observation_tokens": observed.row_sums(),
        "turn_lengths": Ragged.from_rows([t.turn_lengths for t in trajectories], torch.int64),
        "turn_rewards": Ragged.from_rows(
            [[*t.rewards, *[0.0] * (t.turns - len(t.rewards))] for t in trajectories], torch.float32
        ),
        "turn_states": Ragged.from_rows([turn_states(t) for t in trajectories], torch.int64),
    }


def unplayed_columns(rows: Rows, columns: Sequence[str], values: Mapping[str, Tensor]) -> dict[str, Column]:
    """Return the columns of suspended episodes for `rows` whose episodes have not started.

    `values` are the empty columns of an engine without tokens.
    """
    images = rows.get("images")
    trajectories = [Trajectory(uid, per_token=dict(values), finish_reason=FinishReason.ABORT) for uid in rows.uids()]
    for number, (trajectory, prompt) in enumerate(zip(trajectories, rows["prompt"].tolist(), strict=True)):
        trajectory.append(prompt, opens=True, images=() if images is None else moved(images[number], 0))
    return trajectory_columns(trajectories, Limits(1, 1.0, 1, 1), columns, images is not None)


def with_oldest_version(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns of several policies' trajectories, with the version of each episode's oldest token in all
    namespaces; that of an episode without tokens is 0.
    """
    ages, never = dict[str, Tensor](), torch.iinfo(torch.int64).max
    for name, version in columns.items():
        if name.rsplit(".", 1)[-1] == "version":
            drawn = columns[f"{name.removesuffix('version')}action_tokens"]
            assert isinstance(version, Tensor) and isinstance(drawn, Tensor)
            ages[name] = version.where(drawn > 0, never)
    oldest = torch.stack([*ages.values()]).amin(0)
    return {**columns, **dict.fromkeys(ages, oldest.where(oldest < never, 0))}


def turn_states(trajectory: Trajectory) -> list[int]:
    """Return a number for each turn.

    Turns have equal numbers if they have the same tokens and images before them, from the previous turn or the
    sequence's beginning on.
    """
    turns = zip(trajectory.turn_starts, trajectory.turn_lengths, strict=True)
    ends = [0, *(start + length for start, length in turns)]
    digests = []
    for end, start in zip(ends, trajectory.turn_starts, strict=False):
        hashed_context = hashlib.blake2b(array("q", trajectory.tokens[end:start]).tobytes(), digest_size=8)
        for span in trajectory.images:
            if end <= span.start < start:
                hashed_context.update(span.name.encode())
        digests.append(hashed_context.digest())
    return [int.from_bytes(digest, "little", signed=True) for digest in digests]


def response_columns(rows: Rows, finished: Sequence[Response], columns: Sequence[str] = ()) -> dict[str, Column]:
    """Return the columns `tokens` to `version` of single responses, in the order of `rows`; `columns` are named as in
    their requests.

    Raises ValueError if their uids differ.
    """
    by_uid, uids = {response.uid: response for response in finished}, rows.uids()
    if sorted(response.uid for response in finished) != sorted(uids):
        raise ValueError(f"{len(finished)} responses for {len(uids)} rows, which are not the same")
    ordered, prompts = [by_uid[uid] for uid in uids], rows["prompt"]
    both = zip(prompts.unbind(), ordered, strict=True)
    tokens = Ragged.from_rows([torch.cat([prompt, response.tokens]) for prompt, response in both], torch.int64)
    positions = torch.arange(len(tokens.values)) - tokens.spread(tokens.offsets[:-1])
    return generated_columns(
        tokens,
        tokens.with_values(positions >= tokens.spread(prompts.lengths)),
        Ragged.from_lengths(tokens.lengths, torch.ones_like(tokens.lengths)),
        [response.per_token for response in ordered],
        [response.finish_reason for response in ordered],
        columns,
    )


def generated_columns(
    tokens: Ragged,
    action_mask: Ragged,
    sequence_lengths: Ragged,
    per_token: Sequence[Mapping[str, Tensor]],
    reasons: Sequence[FinishReason],
    columns: Sequence[str],
) -> dict[str, Column]:
    """Return the columns `tokens` to `version` of a generate stage; `version` is the oldest action token's, or 0."""
    returned = dict[str, Ragged]()
    for column in returned_columns(columns):
        # A row without generated tokens may lack a column.
        empty = column.empty()
        values = [row.get(column.name, empty) for row in per_token]
        dtype = next((entries.dtype for entries in values if len(entries)), values[0].dtype if values else empty.dtype)
        returned[column.name] = Ragged.from_rows(values, dtype)
    of_tokens = returned[VERSIONS]
    never = torch.iinfo(torch.int64).max
    oldest = torch.full((len(of_tokens),), never).scatter_reduce(0, of_tokens.row_ids(), of_tokens.values, "amin")
    return {
        "tokens": tokens,
        "action_mask": action_mask,
        "sequence_lengths": sequence_lengths,
        **returned,
        "length": tokens.lengths,
        "action_tokens": of_tokens.lengths,
        "finish_reason": torch.tensor([int(reason) for reason in reasons], dtype=torch.int64),
        "version": oldest.where(of_tokens.lengths > 0, 0),
    }
