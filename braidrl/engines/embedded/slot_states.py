"""The states of rows in an engine's slots, and the tokens that one pass of compiled kernels reads.

SlotStates  of every slot: the token to read next, its position, the tokens drawn so far
    ──Kernels.lay_out──▶ Pass: each row's current token and guesses of its next ones ──model, draw──▶ SlotStates

Shapes: B slots, R rows, N tokens of a pass, V vocabulary, T response tokens, S stop tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from braidrl.data.token_columns import LOG_PROBS, column_of
from braidrl.engines.requests import EngineRow

NO_TOKEN = -1
DRAWS = "draws"
"""Name of the column (3,) of how a token was drawn: the ends of the interval in [0, 1) whose random numbers draw it,
and the number that did. The interval is empty if it is not known.
"""
ROW_MULTIPLE = 16
"""Matrix products have a multiple of this many rows: with fewer, a CPU's kernels round the same row differently."""


INTEGERS = ("current", "position", "shift", "drawn", "limit", "key", "first_draw")
"""The fields of `SlotStates` that are rows of `SlotStates.integers`."""


@dataclass
class SlotStates:
    """State of B slots; the fields in INTEGERS and `active` are (B,)."""

    integers: Tensor
    """(7, B), the memory of the fields in INTEGERS."""
    active: Tensor
    stop_token_ids: Tensor
    """(B, S), padded with NO_TOKEN."""
    tokens: Tensor
    """(B, T), the tokens drawn so far."""
    per_token: dict[str, Tensor]
    """Columns of the drawn tokens by name, each (B, T, ...)."""
    current: Tensor = field(init=False)
    """The input token of the next step."""
    position: Tensor = field(init=False)
    """The input token's position in the sequence; 0 in an idle slot."""
    shift: Tensor = field(init=False)
    """The rope's offset of positions, whose axes images shorten."""
    drawn: Tensor = field(init=False)
    """Number of tokens drawn so far."""
    limit: Tensor = field(init=False)
    """Maximum number of tokens to draw."""
    key: Tensor = field(init=False)
    """The row's random key; the next random number has index `first_draw + drawn`."""
    first_draw: Tensor = field(init=False)

    def __post_init__(self) -> None:
        for name, values in zip(INTEGERS, self.integers, strict=True):
            setattr(self, name, values)

    @staticmethod
    def idle(slots: int, dtype: torch.dtype, device: torch.device, draws: bool = False) -> "SlotStates":
        """Make idle slots; `dtype` is that of log-probs. With `draws` they keep how each token was drawn."""
        per_token = {LOG_PROBS: torch.zeros(slots, 1, dtype=dtype, device=device)}
        if draws:
            per_token[DRAWS] = torch.zeros(slots, 1, 3, device=device)
        return SlotStates(
            torch.zeros((len(INTEGERS), slots), dtype=torch.int64, device=device),
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
        of_rows, width = list[list[int]](), self.stop_token_ids.shape[1]
        for row in rows.values():
            request = row.request
            ids = [*row.stop_token_ids, *[NO_TOKEN] * (width - len(row.stop_token_ids))]
            first, last = int(request.prompt[-1]), len(request.prompt) - 1
            of_rows.append([first, last, row.rope_shift, 0, row.limit, request.key(seed), request.first_draw, *ids])
        slots, values = torch.tensor(list(rows)), torch.tensor(of_rows)
        slots, values = slots.to(self.current.device), values.to(self.current.device)
        self.integers[:, slots] = values[:, : len(INTEGERS)].T
        self.stop_token_ids[slots] = values[:, len(INTEGERS) :]
        self.active[slots] = True

    def end(self, slots: Sequence[int]) -> None:
        """Make slots idle: they participate in every step, at position 0 and without effect."""
        slot_index = torch.tensor(slots, dtype=torch.int64, device=self.current.device)
        self.integers[:, slot_index] = 0
        self.active[slot_index] = False
        self.stop_token_ids[slot_index] = NO_TOKEN

    def move(self, source: int, target: int) -> None:
        """Move the state of slot `source` to `target`, and make `source` idle."""
        self.integers[:, target] = self.integers[:, source]
        for tensor in (self.active, self.stop_token_ids, self.tokens, *self.per_token.values()):
            tensor[target] = tensor[source]
        self.end([source])

    def first(self, count: int) -> "SlotStates":
        """Return views of the first `count` slots."""
        per_token = {name: values[:count] for name, values in self.per_token.items()}
        active, stops, tokens = self.active[:count], self.stop_token_ids[:count], self.tokens[:count]
        return SlotStates(self.integers[:, :count], active, stops, tokens, per_token)

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
    """The tokens that one step of compiled kernels reads: the current token of each row, its guesses, and padding. All
    tensors but the first two are (N,).
    """

    row_slots: Tensor
    """(R,), the slot of each row."""
    starts: Tensor
    """(R + 1,), the start of each row's tokens; the last entry is the end of all."""
    rows: Tensor
    """The row of each token; padding repeats the first row's current token."""
    slots: Tensor
    """The slot of each token, -1 for padding."""
    tokens: Tensor
    numbers: Tensor
    """Each token's number among those that its row will have drawn."""
    positions: Tensor
    """Each token's position in the sequence."""
    shifts: Tensor
    uniforms: Tensor
    """The numbers, float64, that draw the tokens behind each."""
