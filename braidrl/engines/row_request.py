"""A request in an engine, as the host tracks it until it ends: by an end of sequence, a stop text, or its length."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from braidrl.data.rows import FinishReason
from braidrl.engines.requests import Request, Response
from braidrl.errors import UserError

CONTEXT = 4
"""Tokens decoded before the span of a stop text: some decoders treat the first token of a text differently."""


class StopTexts:
    """Detector of stop texts in one row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...], begun: Sequence[int] = ()) -> None:
        """Start after the tokens with which the response has `begun`."""
        self._tokenizer = tokenizer
        self._texts = texts
        # Each text token holds at least one byte.
        self._window = max(len(text.encode()) for text in texts) + CONTEXT
        self._tokens = list(begun)[1 - self._window :]

    def contains_stop_text(self, token: int) -> bool:
        """Append a token; return True if the text now ends with, or has just passed, one of the stop texts."""
        self._tokens = [*self._tokens[1 - self._window :], token]
        tail = self._tokenizer.decode(self._tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(text in tail for text in self._texts)


@dataclass
class EngineRow:
    """A requested row in an engine."""

    request: Request
    limit: int
    """Tokens that may be drawn."""
    stop_token_ids: tuple[int, ...]
    stop_texts: StopTexts | None
    begun: int = 0
    """The engine's step in which it got its slot."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(first token, weights version) of each segment of tokens."""
    stop_text_found: bool = False
    """True once the text holds one of the stop texts."""
    recorded: int = 0
    """Number of tokens given to `record_token`."""

    def record_token(self, token: int) -> bool:
        """Record the next drawn token, and call `Request.on_token`; return True if the token completes a stop text."""
        if self.request.on_token is not None:
            self.request.on_token(self.request.continues + self.recorded, token)
        self.recorded += 1
        self.stop_text_found = self.stop_texts is not None and self.stop_texts.contains_stop_text(token)
        return self.stop_text_found

    def length(self, step: int) -> int:
        """Return the number of tokens in the row's slot in this step, including the current input token."""
        return len(self.request.prompt) + step - self.begun

    def finished(self, tokens: Tensor, log_probs: Tensor, aborted: bool = False) -> Response:
        """Return the row's response.

        Args:
            tokens: The response, (T,) int64.
            log_probs: The log-prob of each token when it was drawn, (T,) floating point, in nats.
            aborted: Whether the caller ended the row.
        """
        stopped = self.stop_text_found or (len(tokens) > 0 and int(tokens[-1]) in self.stop_token_ids)
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        lengths = torch.tensor([*(start for start, _ in self.versions), len(tokens)]).diff()
        versions = torch.tensor([v for _, v in self.versions], dtype=torch.int64).repeat_interleave(lengths)
        return Response(self.request.uid, tokens, log_probs, FinishReason.ABORT if aborted else reason, versions)


@dataclass
class RemoteRow:
    """A row that another engine computes, and its tokens so far."""

    row: EngineRow
    name: str = ""
    """The row's name in that engine."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def finished(self, aborted: bool = False) -> Response:
        return self.row.finished(torch.tensor(self.tokens, dtype=torch.int64), torch.tensor(self.log_probs), aborted)


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
    texts = None
    if sampling.stop:
        texts = StopTexts(tokenizer, sampling.stop, request.prompt[length - request.continues :].tolist())
    return EngineRow(request, min(sampling.max_tokens, room), ids, texts)
