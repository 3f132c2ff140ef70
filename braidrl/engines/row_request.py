"""A request in an engine, as the host tracks it until it ends: by an end of sequence, a stop text, or its length."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from braidrl.data.rows import FinishReason
from braidrl.engines.requests import Request, Response
from braidrl.errors import UserError

CONTEXT = 4
"""Tokens decoded before the span of a stop text: some decoders treat the first token of a text differently."""


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
    """The last tokens of the response, in which a stop text may have begun."""
    name: str = ""
    """The row's name in vLLM or on a server."""
    tokens: list[int] = field(default_factory=list)
    """The tokens given to `record_token`."""
    log_probs: list[float] = field(default_factory=list)
    """Their log-probs, in nats; the engine appends them."""
    begun: int = 0
    """The engine's step in which it got its slot."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(first token, weights version) of each segment of tokens."""
    stop_text_found: bool = False
    """True once the text holds one of the stop texts."""

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
        """Return the row's response.

        Args:
            aborted: Whether the caller ended the row.
            drawn: Tokens (T,) int64 and their log-probs (T,) in nats, of an engine that keeps them in tensors.
        """
        tokens, log_probs = drawn or (torch.tensor(self.tokens, dtype=torch.int64), torch.tensor(self.log_probs))
        stopped = self.stop_text_found or (len(tokens) > 0 and int(tokens[-1]) in self.stop_token_ids)
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        lengths = torch.tensor([*(start for start, _ in self.versions), len(tokens)]).diff()
        versions = torch.tensor([v for _, v in self.versions], dtype=torch.int64).repeat_interleave(lengths)
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
