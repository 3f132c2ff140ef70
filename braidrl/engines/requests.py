"""Requests to an engine and its responses: plain values, the same for every engine. A row can continue later or on
another engine.

Request ─row_of─▶ EngineRow, until an end of sequence, a stop text or its length ─▶ Response
    ─remaining_request─▶ Request
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import msgspec

from braidrl.algorithms.random import hashed
from braidrl.config import Config
from braidrl.data.rows import FinishReason, Uid
from braidrl.data.token_columns import LOG_PROBS, VERSIONS, TokenColumn, column_of, token_columns
from braidrl.data.vision import ImageSpan
from braidrl.deferred import Tensor, torch
from braidrl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 4
"""Tokens decoded before the span of a stop text: some decoders treat the first token of a text differently."""
RECENT = 64
"""Finished rows whose lengths are remembered."""
KNOWN = 16
"""Finished rows without which each row is counted with its whole limit."""
ARGUMENT = "braid"
"""The key of a row's draws in vLLM's extra arguments."""


@dataclass(frozen=True)
class SamplingParams:
    """The sampling settings of one response.

    A temperature of 0, or `greedy`, takes the likeliest token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """The number of likeliest tokens to sample from; 0 keeps all tokens."""
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, in addition to the model's end of sequence."""
    stop: tuple[str, ...] = ()
    """The response ends with the token that completes one of these texts."""
    greedy: bool = False
    ends: bool = True
    """False ignores the model's end of sequence."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that leave no token to draw."""
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or self.max_tokens < 1:
            raise ValueError(f"temperature >= 0, 0 < top_p <= 1, top_k >= 0 and max_tokens >= 1 are needed, got {self}")
        if "" in self.stop:
            raise ValueError("a stop text is empty")

    @property
    def takes_likeliest(self) -> bool:
        return self.greedy or self.temperature == 0

    @property
    def log_prob_temperature(self) -> float:
        """Return the divisor of logits before log-softmax; 1 for a temperature of 0, the likeliest token."""
        return self.temperature or 1.0


def training_sampling(config: Config) -> SamplingParams:
    """Return the sampling settings of the tokens to train on."""
    rollout = config.rollout
    return SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_response_tokens)


@dataclass(frozen=True, eq=False)
class Request:
    """A request for one response to `prompt`, (P,) int64 token ids with P >= 1."""

    uid: Uid
    prompt: Tensor
    sampling: SamplingParams
    purpose: str = "train"
    stage: str = "generate"
    first_draw: int = 0
    """Number of tokens that this row drew in earlier turns: their random numbers are not reused."""
    continues: int = 0
    """Number of tokens at the prompt's end that belong to this response: a stop text may start among them."""
    columns: tuple[str, ...] = ()
    """Columns per token that the response must have besides those of every response, by names as in `column_of`."""
    images: tuple[ImageSpan, ...] = ()
    """The images in the prompt, whose tokens are expanded."""
    policy: str | None = None
    """The role whose weights generate, for an engine of several roles."""
    on_token: Callable[[int, int], None] | None = None
    """Called in the engine's event loop with each token's index in the response and its id, as soon as the engine knows
    it. When a row is restarted on another engine, the same tokens are drawn and reported again.
    """

    def __post_init__(self) -> None:
        """Raise ValueError for a prompt that is not a non-empty row of ids."""
        if self.prompt.dim() != 1 or not self.prompt.numel() or self.prompt.dtype != torch.int64:
            raise ValueError(f"row {self.uid}: a prompt is one or more int64 ids, got {self.prompt.shape}")

    def key(self, seed: int) -> int:
        """Return the row's random key; token n of this request uses random number `first_draw` + n."""
        return int(hashed(seed, self.purpose, self.stage, self.uid[1], self.uid[2]))


@dataclass(frozen=True, eq=False)
class Response:
    """A response of T tokens, on the CPU."""

    uid: Uid
    tokens: Tensor
    """(T,) int64, including the stop token."""
    finish_reason: FinishReason
    per_token: Mapping[str, Tensor]
    """The values of each registered column that the request names, and of those of every response."""

    @property
    def log_probs(self) -> Tensor:
        """Return log-softmax(logits / temperature) of each token, (T,), before any top-k or top-p cut."""
        return self.per_token[LOG_PROBS]

    @property
    def versions(self) -> Tensor:
        """Return the version of the weights that drew each token, (T,) int64."""
        return self.per_token[VERSIONS]


@dataclass(frozen=True)
class Changes:
    """Changes of an engine's rows during generation: rows to end with their tokens so far, and rows to add.

    The engine waits while `more` may arrive, even without rows.
    """

    ended: Sequence[Uid] = ()
    added: Sequence[Request] = ()
    more: bool = False


def remaining_request(request: Request, ended: Response) -> Request | None:
    """Return the request for an aborted row's remaining tokens, None without any.

    Raises ValueError for a response of another row.
    """
    if ended.uid != request.uid:
        raise ValueError(f"row {request.uid} cannot continue the response of row {ended.uid}")
    left = request.sampling.max_tokens - len(ended.tokens)
    if ended.finish_reason is not FinishReason.ABORT or left < 1:
        return None
    drawn = len(ended.tokens)
    return replace(
        request,
        prompt=torch.cat([request.prompt, ended.tokens]),
        sampling=replace(request.sampling, max_tokens=left),
        first_draw=request.first_draw + drawn,
        continues=request.continues + drawn,
    )


def joined(parts: Sequence[Response]) -> Response:
    """Concatenate the parts of a row, in order, to one response; each part continues the previous one."""
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    per_token = {
        name: reduce(token_columns[name].extended, (part.per_token[name] for part in parts)) for name in last.per_token
    }
    return replace(last, tokens=torch.cat([part.tokens for part in parts]), per_token=per_token)


def computed_in(requests: Iterable[Request]) -> tuple[TokenColumn, ...]:
    """Return the columns of these requests that are functions of logits and tokens."""
    names = dict.fromkeys(name for request in requests for name in request.columns)
    return tuple(column for column in map(column_of, names) if column.function is not None)


@dataclass
class EngineRow:
    """A requested row in an engine, and its tokens so far."""

    request: Request
    limit: int
    """Maximum number of tokens to draw."""
    stop_token_ids: tuple[int, ...] = ()
    tokenizer: "PreTrainedTokenizerBase | None" = None
    """Decodes the tokens of a row with stop texts; None without any."""
    tail: list[int] = field(default_factory=list)
    """The last tokens of the response, in which a stop text may have started."""
    name: str = ""
    """The row's name in vLLM or on a server."""
    tokens: list[int] = field(default_factory=list)
    """The tokens passed to `record_token`."""
    log_probs: list[float] = field(default_factory=list)
    """Their log-probs, in nats; the engine appends them."""
    per_token: dict[str, Tensor] = field(default_factory=dict)
    """Their values of the requested columns, for `finished`; the engine sets them."""
    rope_shift: int = 0
    """The rope's offset of positions after the prompt's images."""
    started: int = 0
    """The engine's step in which it got a slot."""
    version: int = 0
    stop_text_found: bool = False

    def record_token(self, token: int) -> bool:
        """Record the next drawn token, and call `Request.on_token`; return True if the token ends the row."""
        if self.request.on_token is not None:
            self.request.on_token(self.request.continues + len(self.tokens), token)
        self.tokens.append(token)
        if self.tokenizer is not None:
            stops = self.request.sampling.stop
            # Each text token holds at least one byte.
            span = max(len(stop.encode()) for stop in stops) + CONTEXT
            self.tail = [*self.tail[1 - span :], token]
            text = self.tokenizer.decode(self.tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self.stop_text_found = any(stop in text for stop in stops)
        return self.stop_text_found or token in self.stop_token_ids or len(self.tokens) == self.limit

    def finished(self, aborted: bool = False, drawn: tuple[Tensor, Mapping[str, Tensor]] | None = None) -> Response:
        """Return the row's response; `drawn` are tokens (T,) int64 and columns of an engine that keeps them in tensors.

        Raises UserError if the engine does not give a column that the request names.
        """
        tokens, values = drawn or (
            torch.tensor(self.tokens, dtype=torch.int64),
            {LOG_PROBS: torch.tensor(self.log_probs), **self.per_token},
        )
        per_token = {**values, VERSIONS: torch.full((len(tokens),), self.version)}
        for column in map(column_of, self.request.columns):
            column_values = per_token.setdefault(column.name, column.empty())
            if len(column_values) != (expected := column.entries(len(self.request.prompt), len(tokens))):
                raise UserError(
                    f"row {self.request.uid}: the engine gives {len(column_values)} values of the column "
                    f"{column.name} for {expected} tokens; use rollout.engine=embedded, or fix the engine"
                )
        stopped = self.stop_text_found or (len(tokens) > 0 and int(tokens[-1]) in self.stop_token_ids)
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return Response(self.request.uid, tokens, FinishReason.ABORT if aborted else reason, per_token)


def row_of(
    request: Request, tokenizer: "PreTrainedTokenizerBase", end_ids: tuple[int, ...], max_sequence_tokens: int
) -> EngineRow:
    """Make the row of a request. Raises UserError for a prompt that leaves no room for a response."""
    sampling, length = request.sampling, request.prompt.numel()
    room = max_sequence_tokens - length
    if room < 1:
        raise UserError(
            f"row {request.uid}: a prompt of {length} tokens leaves no room for a response in a sequence of "
            f"{max_sequence_tokens}; shorten it or raise the limit"
        )
    ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *(end_ids if sampling.ends else ()))))
    row = EngineRow(request, min(sampling.max_tokens, room), ids)
    if sampling.stop:
        row.tokenizer, row.tail = tokenizer, request.prompt[length - request.continues :].tolist()
    return row


@dataclass(frozen=True)
class Draws:
    """The values with which another engine draws a row's tokens: random key, first draw, and sampling settings."""

    key: int
    first: int
    sampling: SamplingParams
    columns: tuple[str, ...] = ()
    name: str = ""
    """The row's name, under which the values of these columns are kept."""


def draw_arguments(row: EngineRow, seed: int) -> dict[str, str]:
    """Return a row's draws in a run with this seed, as text under one key, which engines and servers pass through."""
    request = row.request
    draws = Draws(request.key(seed), request.first_draw, request.sampling, request.columns, row.name)
    return {ARGUMENT: msgspec.json.encode(draws).decode()}


def parse_draws(arguments: Mapping[str, Any] | None) -> Draws:
    """Invert `draw_arguments`. Raises ValueError for a request that Braid did not make."""
    try:
        return msgspec.json.decode((arguments or {}).get(ARGUMENT, ""), type=Draws)
    except (TypeError, msgspec.DecodeError):
        raise ValueError(
            "this engine draws tokens for Braid alone: ask it through `braid train` with rollout.engine=http"
        ) from None


def rows_to_begin(
    capacity: int, block: int, recent: Collection[float], running: Iterable[EngineRow], waiting: Iterable[EngineRow]
) -> int:
    """Return how many of the waiting rows, in order, fit in addition to the running ones; the first waiting row always
    fits.

    `capacity` is the number of tokens whose keys and values fit, in blocks of `block` tokens. `recent` are the shares
    of their limits that recent rows have drawn, from 0 to 1. A preemption means that rows drew more than expected: it
    counts as a row that has drawn its full limit.
    """
    share = max(recent) if len(recent) >= KNOWN else 1.0

    def needed(row: EngineRow) -> int:
        drawn = max(len(row.tokens) + 1, round(share * row.limit))
        return -(-(len(row.request.prompt) + min(drawn, row.limit)) // block) * block

    reserved = [needed(row) for row in running]
    left, started = capacity - sum(reserved), 0
    for row in waiting:
        left -= needed(row)
        if left < 0 and (reserved or started):
            break
        started += 1
    return started
