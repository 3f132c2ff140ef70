"""The states of rows in an engine's slots, and the tokens that one pass of compiled kernels reads.

SlotStates  of every slot: the token to read next, its position, the tokens drawn so far
    ──Pass.of──▶ Pass: each row's current token and guesses of its next ones ──model, draw──▶ SlotStates

Shapes: B slots, R rows, N tokens of a pass, K guesses of a row, V vocabulary, T response tokens, S stop tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from braidrl.data.token_columns import LOG_PROBS, column_of
from braidrl.engines.requests import EngineRow

NO_TOKEN = -1
NO_SLOT = -1
DRAWS = "draws"
"""Name of the column (3,) of how a token was drawn: the ends of the interval in [0, 1) whose random numbers draw it,
and the number that did. The interval is empty if it is not known.
"""
ROW_MULTIPLE = 16
"""Matrix products have a multiple of this many rows: with fewer, a CPU's kernels round the same row differently."""


@dataclass
class SlotStates:
    """State of B slots; all tensors except `tokens`, `per_token` and `stop_token_ids` are (B,)."""

    current: Tensor
    """The input token of the next step."""
    position: Tensor
    """The input token's position in the sequence; 0 in an idle slot."""
    shift: Tensor
    """The rope's offset of positions, whose axes images shorten."""
    drawn: Tensor
    """Number of tokens drawn so far."""
    limit: Tensor
    """Maximum number of tokens to draw."""
    active: Tensor
    key: Tensor
    """The row's random key; the next random number has index `first_draw + drawn`."""
    first_draw: Tensor
    stop_token_ids: Tensor
    """(B, S), padded with NO_TOKEN."""
    tokens: Tensor
    """(B, T), the tokens drawn so far."""
    per_token: dict[str, Tensor]
    """Columns of the drawn tokens by name, each (B, T, ...)."""

    @staticmethod
    def idle(slots: int, dtype: torch.dtype, device: torch.device, draws: bool = False) -> "SlotStates":
        """Make idle slots; `dtype` is that of log-probs. With `draws` they keep how each token was drawn."""
        per_token = {LOG_PROBS: torch.zeros(slots, 1, dtype=dtype, device=device)}
        if draws:
            per_token[DRAWS] = torch.zeros(slots, 1, 3, device=device)
        integers = ("current", "position", "shift", "drawn", "limit", "key", "first_draw")
        return SlotStates(
            **{name: torch.zeros(slots, dtype=torch.int64, device=device) for name in integers},
            active=torch.zeros(slots, dtype=torch.bool, device=device),
            stop_token_ids=torch.full((slots, 1), NO_TOKEN, device=device),
            tokens=torch.zeros(slots, 1, dtype=torch.int64, device=device),
            per_token=per_token,
        )

    def begin(self, rows: Mapping[int, EngineRow], seed: int) -> None:
        """Put rows into slots; all slots get space for their response and stop tokens."""
        longest = max(self.tokens.shape[1], *(row.limit for row in rows.values()))
        stopping = max(len(row.stop_token_ids) for row in rows.values())
        for column in map(column_of, dict.fromkeys(name for row in rows.values() for name in row.request.columns)):
            if column.function is not None and column.name not in self.per_token:
                dtype = column.dtype or self.per_token[LOG_PROBS].dtype
                room = len(self.tokens), longest, *(column.shape or ())
                self.per_token[column.name] = torch.zeros(room, dtype=dtype, device=self.tokens.device)
        self.tokens = widened(self.tokens, longest)
        self.per_token = {name: widened(values, longest) for name, values in self.per_token.items()}
        self.stop_token_ids = widened(self.stop_token_ids, stopping, NO_TOKEN)
        requests = [row.request for row in rows.values()]
        stops = torch.full((len(rows), self.stop_token_ids.shape[1]), NO_TOKEN)
        for number, row in enumerate(rows.values()):
            stops[number, : len(row.stop_token_ids)] = torch.tensor(row.stop_token_ids, dtype=torch.int64)
        values = {
            "current": torch.stack([request.prompt[-1] for request in requests]),
            "position": torch.tensor([len(request.prompt) - 1 for request in requests]),
            "shift": torch.tensor([row.rope_shift for row in rows.values()]),
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
        """Make slots idle: they participate in every step, at position 0 and without effect."""
        slot_index = torch.tensor(slots, dtype=torch.int64, device=self.current.device)
        for name in ("current", "position", "shift", "drawn", "limit", "active"):
            getattr(self, name)[slot_index] = 0
        self.stop_token_ids[slot_index] = NO_TOKEN

    def move(self, source: int, target: int) -> None:
        """Move the state of slot `source` to `target`, and make `source` idle."""
        for tensor in self.tensors().values():
            tensor[target] = tensor[source]
        self.end([source])

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name."""
        return {**{name: value for name, value in vars(self).items() if name != "per_token"}, **self.per_token}

    def first(self, count: int) -> "SlotStates":
        """Return views of the first `count` slots."""
        views = {name: value[:count] for name, value in vars(self).items() if name != "per_token"}
        return SlotStates(**views, per_token={name: values[:count] for name, values in self.per_token.items()})

    def advance(self, tokens: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Append the drawn tokens (B,) and their columns (B, ...), and mark active slots that reached a stop token or
        their limit, (B,) bool.
        """
        # An idle slot writes its position 0, which the next row overwrites.
        positions = self.drawn[:, None]
        self.tokens.scatter_(1, positions, tokens[:, None])
        for name, drawn in values.items():
            index = positions.view(-1, *[1] * drawn.dim()).expand(-1, 1, *drawn.shape[1:])
            self.per_token[name].scatter_(1, index, drawn[:, None])
        self.current.copy_(tokens)
        self.drawn += self.active
        self.position += self.active
        stopped = (self.stop_token_ids == tokens[:, None]).any(-1)
        return (stopped | (self.drawn >= self.limit)) & self.active


def widened(values: Tensor, room: int, filler: int = 0) -> Tensor:
    """Return values (B, T, ...) padded to at least `room` entries for each row."""
    more = room - values.shape[1]
    return pad(values, (*[0, 0] * (values.dim() - 2), 0, more), value=filler) if more > 0 else values


def indices_of(mask: Tensor) -> list[int]:
    """Return the indices of True in a mask (B,); the host waits for the device."""
    indices: list[int] = mask.nonzero().flatten().tolist()
    return indices


@dataclass(frozen=True)
class Pass:
    """The tokens that one step of compiled kernels reads: the current token of each row, its guesses, and padding."""

    slots: Tensor
    """(R,), the slot of each row."""
    starts: Tensor
    """(R + 1,), the start of each row's tokens; the last entry is the end of all."""
    rows: Tensor
    """(N,), the row of each token; 0 for padding."""
    offsets: Tensor
    """(N,), a token's distance from the current token of its row."""
    token_slots: Tensor
    """(N,), NO_SLOT for padding."""
    guesses: Tensor | None = None
    """(R, K), the guesses, of which a prefix is read."""

    @staticmethod
    def of(slots: Tensor, multiple: int, guesses: tuple[Tensor, Tensor] | None = None) -> "Pass":
        """Read the current token of the rows in these slots (R,), and of each row its guesses (R, K).

        The pass has a multiple of `multiple` tokens.
        """
        counts = torch.ones_like(slots) if guesses is None else guesses[1] + 1
        starts = pad(counts.cumsum(0), (1, 0))
        filler = -int(starts[-1]) % multiple
        rows = torch.repeat_interleave(torch.arange(len(slots)), counts)
        offsets = torch.arange(len(rows)) - starts[rows]
        token_slots = pad(slots[rows], (0, filler), value=NO_SLOT)
        return Pass(
            slots, starts, pad(rows, (0, filler)), pad(offsets, (0, filler)), token_slots, guesses and guesses[0]
        )

    def tokens(self, states: SlotStates) -> Tensor:
        """Return the ids that are read, (N,)."""
        current = states.current[self.slots[self.rows]]
        if self.guesses is None:
            return current
        return torch.where(self.offsets > 0, self.guesses[self.rows, self.offsets - 1], current)
