"""Requests to an engine and its responses: plain values, the same for every engine. A row can continue later or on
another engine.

Request ─row_of─▶ EngineRow, until an end of sequence, a stop text or its length ─▶ Response
    ─remaining_request─▶ Request
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from braidrl.algorithms.random import hashed
from braidrl.data.rows import FinishReason, Uid
from braidrl.errors import UserError

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
    """The sampling settings of one response. A temperature of 0, or `greedy`, takes the likeliest token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """The number of likeliest tokens to sample from; 0 keeps all tokens."""
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, besides the model's own end of sequence."""
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
        """Return the divisor of logits before log-softmax; 1 for a temperature of 0, which takes the likeliest
        token.
        """
        return self.temperature or 1.0


@dataclass(frozen=True, eq=False)
class Request:
    """A request for one response to `prompt`, (P,) int64 token ids with P >= 1."""

    uid: Uid
    prompt: Tensor
    sampling: SamplingParams
    purpose: str = "train"
    stage: str = "generate"
    first_draw: int = 0
    """Number of tokens that this row drew in earlier turns: their random numbers are not used again."""
    continues: int = 0
    """Number of tokens at the prompt's end that begin this response: a stop text may start among them."""
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
    """(T,) int64, the stop token included."""
    log_probs: Tensor
    """(T,) log-softmax(logits / temperature) of each token, before any top-k or top-p cut."""
    finish_reason: FinishReason
    versions: Tensor
    """(T,) int64, the version of the weights that drew each token."""


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
    """Concatenate the parts of a row, in order, to one response; each part continues the one before."""
    if len(parts) == 1:
        return parts[0]
    whole: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "log_probs", "versions")
    }
    return replace(parts[-1], **whole)


@dataclass
class EngineRow:
    """A requested row in an engine, and its tokens so far."""

    request: Request
    limit: int
    """Tokens that may be drawn."""
    stop_token_ids: tuple[int, ...] = ()
    tokenizer: PreTrainedTokenizerBase | None = None
    """Decodes the tokens of a row with stop texts; None without any."""
    tail: list[int] = field(default_factory=list)
    """The last tokens of the response, in which a stop text may have started."""
    name: str = ""
    """The row's name in vLLM or on a server."""
    tokens: list[int] = field(default_factory=list)
    """The tokens given to `record_token`."""
    log_probs: list[float] = field(default_factory=list)
    """Their log-probs, in nats; the engine appends them."""
    started: int = 0
    """The engine's step in which it got its slot."""
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

    def finished(self, aborted: bool = False, drawn: tuple[Tensor, Tensor] | None = None) -> Response:
        """Return the row's response; `drawn` are tokens (T,) int64 and log-probs (T,) in nats of an engine that keeps
        them in tensors.
        """
        tokens, log_probs = drawn or (torch.tensor(self.tokens, dtype=torch.int64), torch.tensor(self.log_probs))
        stopped = self.stop_text_found or (len(tokens) > 0 and int(tokens[-1]) in self.stop_token_ids)
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        versions = torch.full((len(tokens),), self.version)
        return Response(self.request.uid, tokens, log_probs, FinishReason.ABORT if aborted else reason, versions)


def row_of(
    request: Request, tokenizer: PreTrainedTokenizerBase, end_ids: tuple[int, ...], max_sequence_tokens: int
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
    """The values with which another engine draws a row's tokens: random key, index of the first draw, and sampling
    settings.
    """

    key: int
    first: int
    sampling: SamplingParams


def draw_arguments(request: Request, seed: int) -> dict[str, str]:
    """Return the draws of a request's row in a run with this seed, as text under one key, which engines and servers
    pass through.
    """
    draws = Draws(request.key(seed), request.first_draw, request.sampling)
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
    """Return how many of the waiting rows, in their order, have room beside the running ones; the first row always has.

    `capacity` tokens have room for their keys and values, in blocks of `block` tokens. `recent` are the parts of their
    limits that recent rows have drawn, from 0 to 1. A preemption means that rows drew more than was expected: it counts
    as a row that has drawn its whole limit.
    """
    share = max(recent) if len(recent) >= KNOWN else 1.0

    def needed(row: EngineRow) -> int:
        drawn = max(len(row.tokens) + 1, round(share * row.limit))
        return -(-(len(row.request.prompt) + min(drawn, row.limit)) // block) * block

    taken = [needed(row) for row in running]
    left, started = capacity - sum(taken), 0
    for row in waiting:
        left -= needed(row)
        if left < 0 and (taken or started):
            break
        started += 1
    return started
