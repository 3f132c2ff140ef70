"""The state of each slot, one tensor per quantity, so that a decode step has no loop over rows; and the prompts of rows that wait for one.

All ids of a prompt except the last go through the model in `Prompts`; a slot decodes the last one first. So every token is drawn in a
decode step, at the shape that all rows share.

Shapes: B slots, R rows, T response tokens, S stop tokens.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from braidrl.engines.row_request import EngineRow
from braidrl.training.compute.attention import PackedSequences
from braidrl.training.compute.slots import PrefillSequences, Prefix, round_up
from braidrl.training.decoders.body import run_body

NO_TOKEN = -1
ROW_MULTIPLE = 16
"""Matrix products have a multiple of this many rows: with fewer, a CPU's kernels round the same row differently."""
PREFILL_TOKENS = 8192
"""Prompt tokens in one forward pass; a longer prompt goes alone."""


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
    stop_token_ids: Tensor
    """(B, S), padded with NO_TOKEN."""
    tokens: Tensor
    """(B, T), the tokens drawn so far."""
    log_probs: Tensor
    """(B, T), the log-probs of the drawn tokens."""

    @staticmethod
    def idle(slots: int, dtype: torch.dtype, device: torch.device) -> "SlotStates":
        """Make idle slots; `dtype` is that of log-probs."""
        whole = ("current", "position", "drawn", "limit", "key", "first_draw")
        return SlotStates(
            **{name: torch.zeros(slots, dtype=torch.int64, device=device) for name in whole},
            active=torch.zeros(slots, dtype=torch.bool, device=device),
            stop_token_ids=torch.full((slots, 1), NO_TOKEN, device=device),
            tokens=torch.zeros(slots, 1, dtype=torch.int64, device=device),
            log_probs=torch.zeros(slots, 1, dtype=dtype, device=device),
        )

    def begin(self, rows: Mapping[int, EngineRow], seed: int, response_tokens: int, stop_tokens: int) -> None:
        """Put rows into slots; all slots get room for at least so many response and stop tokens."""
        rooms = {"tokens": response_tokens, "log_probs": response_tokens, "stop_token_ids": stop_tokens}
        for name, room in rooms.items():
            held: Tensor = getattr(self, name)
            if (more := room - held.shape[1]) > 0:
                setattr(self, name, pad(held, (0, more), value=NO_TOKEN if name == "stop_token_ids" else 0))
        requests = [row.request for row in rows.values()]
        stops = torch.full((len(rows), self.stop_token_ids.shape[1]), NO_TOKEN)
        for number, row in enumerate(rows.values()):
            stops[number, : len(row.stop_token_ids)] = torch.tensor(row.stop_token_ids, dtype=torch.int64)
        values = {
            "current": torch.stack([request.prompt[-1] for request in requests]),
            "position": torch.tensor([len(request.prompt) - 1 for request in requests]),
            "drawn": torch.zeros(len(requests), dtype=torch.int64),
            "limit": torch.tensor([row.limit for row in rows.values()]),
            "active": torch.ones(len(requests), dtype=torch.bool),
            "key": torch.tensor([request.key(seed) for request in requests]),
            "first_draw": torch.tensor([request.first_draw for request in requests]),
            "stop_token_ids": stops,
        }
        slots = torch.tensor(list(rows), device=self.current.device)
        for name, value in values.items():
            getattr(self, name)[slots] = value.to(self.current.device)

    def end(self, slots: Sequence[int]) -> None:
        """Make slots idle: they take part in every step, at position 0 and without effect."""
        places = torch.tensor(slots, dtype=torch.int64, device=self.current.device)
        for name in ("current", "position", "drawn", "limit", "active"):
            getattr(self, name)[places] = 0
        self.stop_token_ids[places] = NO_TOKEN

    def move(self, source: int, target: int) -> None:
        """Move the state of slot `source` to `target`, and make `source` idle."""
        for fact in fields(self):
            tensor = getattr(self, fact.name)
            tensor[target] = tensor[source]
        self.end([source])

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


@dataclass
class Prompts:
    """The prompts of waiting rows, by their ids as bytes: each is computed once for all rows that begin with it, also across groups."""

    prefixes: dict[bytes, Prefix] = field(default_factory=dict)
    """Keys and values of each computed prompt, without its last token; kept until the last of its rows has a slot."""
    waiting: Counter[bytes] = field(default_factory=Counter)
    """The number of waiting rows with each prompt."""
    computed_tokens: int = 0

    def expect(self, prompt: Tensor, rows: int = 1) -> None:
        """Count so many more waiting rows with this prompt, or fewer; after the last one, free its keys and values."""
        name = prompt.numpy().tobytes()
        self.waiting[name] += rows
        if not self.waiting[name]:
            del self.waiting[name]
            self.prefixes.pop(name, None)

    def compute(self, model: PreTrainedModel, prompts: Mapping[bytes, Tensor]) -> None:
        """Compute the keys and values of prompts that have none yet, several in one packed forward."""
        parts: list[dict[bytes, Tensor]] = []
        held = PREFILL_TOKENS
        for name, prompt in prompts.items():
            ids = prompt[:-1]
            if name in self.prefixes or not len(ids):
                continue
            if round_up(held + len(ids), ROW_MULTIPLE) > PREFILL_TOKENS:
                parts.append({})
                held = 0
            parts[-1][name] = ids
            held += len(ids)
        for part in parts:
            lengths = [len(ids) for ids in part.values()]
            filler = -sum(lengths) % ROW_MULTIPLE
            sequences = PackedSequences.of([*lengths, filler], model.device)
            packed = torch.cat([*part.values(), torch.zeros(filler, dtype=torch.int64)])
            keeping = PrefillSequences(sequences)
            run_body(model, packed[None].to(model.device), sequences.position_ids(), keeping)
            self.prefixes |= dict(zip(part, keeping.prefixes(len(lengths)), strict=True))
            self.computed_tokens += sum(lengths)
