"""The state of each slot, one tensor per quantity, so that a decode step has no loop over rows.

Shapes: B slots, T response tokens, S stop tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from braidrl.algorithms.random import uniform
from braidrl.engines.requests import SamplingParams
from braidrl.engines.row_request import EngineRow
from braidrl.engines.sampling import BatchSampling, batch_sampling

NO_TOKEN = -1


@dataclass
class SlotStates:
    """State of B slots; all but `tokens`, `log_probs` and `stop_token_ids` are (B,)."""

    current: Tensor
    """The input token of the next step."""
    position: Tensor
    """The input token's position in the sequence; 0 in an idle slot."""
    drawn: Tensor
    """Tokens drawn so far."""
    limit: Tensor
    """Tokens that may be drawn."""
    active: Tensor
    key: Tensor
    """The row's random key; the next random number has index `first_draw + drawn`."""
    first_draw: Tensor
    temperature: Tensor
    greedy: Tensor
    top_k: Tensor
    top_p: Tensor
    stop_token_ids: Tensor
    """(B, S), padded with NO_TOKEN."""
    tokens: Tensor
    """(B, T), the tokens drawn so far."""
    log_probs: Tensor
    """(B, T), the log-probs of the drawn tokens."""

    @staticmethod
    def idle(
        slots: int, response_tokens: int, stop_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> "SlotStates":
        """Make idle slots with room for so many response and stop tokens each."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        return SlotStates(
            current=zeros(), position=zeros(), drawn=zeros(), limit=zeros(), active=zeros(dtype=torch.bool),
            key=zeros(), first_draw=zeros(),
            temperature=zeros(dtype=torch.float64) + 1.0, greedy=zeros(dtype=torch.bool),
            top_k=zeros(), top_p=zeros(dtype=torch.float64) + 1.0,
            stop_token_ids=zeros(stop_tokens) + NO_TOKEN,
            tokens=zeros(response_tokens), log_probs=zeros(response_tokens, dtype=dtype),
        )  # fmt: skip

    def first(self, slots: int) -> "SlotStates":
        """Return views of the first so many slots."""
        return SlotStates(**{fact.name: getattr(self, fact.name)[:slots] for fact in fields(self)})

    def with_room(self, response_tokens: int, stop_tokens: int) -> "SlotStates":
        """Return the same states with room for at least so many response and stop tokens."""
        old = (self.tokens.shape[1], self.stop_token_ids.shape[1])
        new = (max(old[0], response_tokens), max(old[1], stop_tokens))
        if new == old:
            return self
        grown = SlotStates.idle(len(self.current), *new, self.log_probs.dtype, self.log_probs.device)
        for fact in fields(self):
            source, target = getattr(self, fact.name), getattr(grown, fact.name)
            (target if target.dim() == 1 else target[:, : source.shape[1]]).copy_(source)
        return grown

    def begin(self, slots: Tensor, rows: Sequence[EngineRow], seed: int) -> None:
        """Put a row into each of `slots` (R,)."""
        requests = [row.request for row in rows]
        samplings = [request.sampling for request in requests]
        stops = torch.full((len(rows), self.stop_token_ids.shape[1]), NO_TOKEN)
        for number, row in enumerate(rows):
            stops[number, : len(row.stop_token_ids)] = torch.tensor(row.stop_token_ids, dtype=torch.int64)
        values = {
            "current": torch.stack([request.prompt[-1] for request in requests]),
            "position": torch.tensor([len(request.prompt) - 1 for request in requests]),
            "drawn": torch.zeros(len(requests), dtype=torch.int64),
            "limit": torch.tensor([row.limit for row in rows]),
            "active": torch.ones(len(requests), dtype=torch.bool),
            "key": torch.tensor([request.key(seed) for request in requests]),
            "first_draw": torch.tensor([request.first_draw for request in requests]),
            "temperature": torch.tensor([s.log_prob_temperature for s in samplings], dtype=torch.float64),
            "greedy": torch.tensor([s.takes_likeliest for s in samplings]),
            "top_k": torch.tensor([s.top_k for s in samplings]),
            "top_p": torch.tensor([s.top_p for s in samplings], dtype=torch.float64),
            "stop_token_ids": stops,
        }
        for name, value in values.items():
            getattr(self, name)[slots] = value.to(self.current.device)

    def end(self, slots: Tensor) -> None:
        """Make `slots` (R,) idle: they take part in every step, at position 0 and without effect."""
        for name in ("current", "position", "drawn", "limit", "active", "greedy", "top_k"):
            getattr(self, name)[slots] = 0
        self.temperature[slots] = 1.0
        self.top_p[slots] = 1.0
        self.stop_token_ids[slots] = NO_TOKEN

    def move(self, source: int, target: int) -> None:
        """Move the state of slot `source` to `target`, and make `source` idle."""
        for fact in fields(self):
            tensor = getattr(self, fact.name)
            tensor[target] = tensor[source]
        self.end(torch.tensor([source], device=self.current.device))

    def batch_sampling(self, asked: Sequence[SamplingParams]) -> BatchSampling:
        """Return the slots' sampling settings; a setting that no row uses is None."""
        return batch_sampling(asked, self.temperature, self.greedy, self.top_k, self.top_p)

    def uniforms(self) -> Tensor:
        """Return the random number of each slot's next token, (B,) float64."""
        return uniform(self.key, self.first_draw + self.drawn)

    def advance(self, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Append the drawn tokens (B,), and mark active slots that reached a stop token or their limit, (B,) bool."""
        # An idle slot writes its own position 0, which the next row overwrites.
        places = self.drawn[:, None]
        self.tokens.scatter_(1, places, tokens[:, None])
        self.log_probs.scatter_(1, places, log_probs[:, None])
        self.current.copy_(tokens)
        self.drawn += self.active
        self.position += self.active
        stopped = (self.stop_token_ids == tokens[:, None]).any(-1)
        return (stopped | (self.drawn >= self.limit)) & self.active
