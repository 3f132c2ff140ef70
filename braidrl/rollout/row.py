"""A request on its way through an engine, as the host knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from braidrl.data.rows import FinishReason
from braidrl.errors import UserError
from braidrl.rollout.requests import Request, Response
from braidrl.rollout.stopping import StopTexts


@dataclass
class Row:
    """One row, from the moment that it is asked for."""

    request: Request
    limit: int
    """Tokens that may be drawn."""
    stop_token_ids: tuple[int, ...]
    stop_texts: StopTexts | None
    begun: int = 0
    """The engine's step in which it got its slot."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(first token, version of the weights) of each stretch of tokens."""
    said_stop: bool = False
    """True once the text holds one of the stop texts."""

    def hears_stop(self, token: int) -> bool:
        """True when the text is complete to a stop text with this token, the next one drawn."""
        self.said_stop = self.stop_texts is not None and self.stop_texts.says_stop(token)
        return self.said_stop

    def length(self, step: int) -> int:
        """Tokens that the row's slot holds in this step, the one being fed included."""
        return len(self.request.prompt) + step - self.begun

    def finished(self, tokens: Tensor, log_probs: Tensor, aborted: bool = False) -> Response:
        """The response of these tokens (T,) and log-probs (T,)."""
        stopped = self.said_stop or (len(tokens) > 0 and int(tokens[-1]) in self.stop_token_ids)
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return Response(
            self.request.uid, tokens, log_probs, FinishReason.ABORT if aborted else reason, self._versions(len(tokens))
        )

    def _versions(self, tokens: int) -> Tensor:
        """The version that drew each of the tokens, (T,) int64."""
        starts = [start for start, _ in self.versions] + [tokens]
        lengths = torch.tensor(starts).diff()
        return torch.tensor([version for _, version in self.versions], dtype=torch.int64).repeat_interleave(lengths)


@dataclass
class Flight:
    """A row that somebody else computes, and what has come back for it so far."""

    row: Row
    name: str = ""
    """Under which whoever computes it knows it."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def finished(self, aborted: bool = False) -> Response:
        return self.row.finished(torch.tensor(self.tokens, dtype=torch.int64), torch.tensor(self.log_probs), aborted)


def row_of(
    request: Request, tokenizer: PreTrainedTokenizerBase, end_ids: tuple[int, ...], max_sequence_tokens: int
) -> Row:
    """What a request asks of an engine with these ends and this room. Raises UserError for a prompt that leaves no room."""
    sampling, length = request.sampling, len(request.prompt)
    room = max_sequence_tokens - length
    if room < 1:
        raise UserError(
            f"row {request.uid}: a prompt of {length} tokens leaves no room for a response in a sequence of "
            f"{max_sequence_tokens}; shorten it or raise the limit"
        )
    ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *(end_ids if sampling.ends else ()))))
    texts = StopTexts(tokenizer, sampling.stop) if sampling.stop else None
    return Row(request, min(sampling.max_tokens, room), ids, texts)
