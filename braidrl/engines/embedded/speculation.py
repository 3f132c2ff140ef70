"""Exact speculation: guesses of each row's next tokens, which one pass of the model checks together.

texts of a prompt: itself, its rows, their responses in earlier epochs ──▶ guesses with probabilities
    ──longest useful prefix for this pass──▶ pass ──▶ the tokens that the row draws; guesses that equal them are kept

A row's draw at a position depends only on logits and the row's random number, so a guess is accepted exactly if it
is the token that the row draws there. Tokens and log-probs are those without guesses; only the number of passes
changes. The random numbers of the next positions are known: where an earlier text has the same words, they say which
of the tokens that were drawn there comes next.

The number of guesses of a pass is chosen by their measured reliability and the measured cost of passes of each size
(SuffixDecoding, arXiv 2411.04975; responses of earlier epochs: RhymeRL, arXiv 2508.18588).

Shapes: R rows, K guesses of a row, D tokens of the longest context, T tokens of a text.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from braidrl.engines.embedded.slot_states import DRAWS, SlotStates
from braidrl.engines.requests import Request
from braidrl.native.building import address, library

Array = np.ndarray[Any, Any]
DEPTH = 16
"""Tokens of the longest context, as in drafts.c."""
INSIDE, OUTSIDE = (0.5, 0.7, 0.85, 0.95), (0.3, 0.15, 0.05)
"""Reliabilities before any measurement, by how far a random number is inside of a known interval, or outside."""
SHARES = 8
CELLS = (5, SHARES + len(INSIDE) + len(OUTSIDE), 4)
"""Cells of reliability: lengths of contexts, kinds of guesses, numbers of occurrences, as in drafts.c."""
BINS = 20
"""Bins of reliability of the best guess of all contexts, as in drafts.c."""
LONGEST = 16
"""Guesses of a row in one pass."""
PASS_TOKENS = 512
"""The most tokens in one step with guesses."""
LEAST = 0.02
"""Guesses less probable than this are not made."""
GAIN = 1.1
"""Guesses are taken if a pass then draws so many times as many tokens per second."""
FEW = 32
"""The most rows for which guesses are considered: with more, a pass is bound by arithmetic, not by reading weights."""
LOSS = 0.01
"""The share of passes that guesses may cost more than they save, in the long run."""
CREDIT = 2.0
"""Passes that guesses may cost at first, and again with new weights; at most twice as many after some were saved."""
SETTLED = 100
"""Passes after which new weights renew the credit."""
RECHECK = 4
"""Passes until costs are looked at again while rows fill the machine."""
MOST_WAIT = 64
"""Passes after which guesses are considered again, if they were not worth it."""
REMEMBERED = 16
"""Earlier responses that are remembered for each prompt."""
REMEMBERED_TOKENS = 1 << 23
"""Tokens of all of them, 16 bytes each; the prompts that were used last stay."""
PROMPT_TOKENS = 4096
"""Last tokens of a prompt from which is guessed; a token takes 120 bytes and more in a book."""
MEASURED = 5
"""Measurements of a pass's seconds that count, by its size."""
VALID = 256
"""Passes after which a measurement does not count any more: contexts have grown."""


class EarlierResponses:
    """The last responses to each prompt, by the prompt's ids as bytes: an epoch later they are likely to repeat."""

    def __init__(self, most_tokens: int = REMEMBERED_TOKENS) -> None:
        self._most_tokens, self._tokens = most_tokens, 0
        self._of_prompt: OrderedDict[bytes, deque[tuple[Array, Array]]] = OrderedDict()

    def add(self, prompt: bytes, response: Array, draws: Array) -> None:
        """Add a response (T,) with its draws (T, 3)."""
        if (responses := self._of_prompt.get(prompt)) is None:
            responses = self._of_prompt[prompt] = deque()
        self._of_prompt.move_to_end(prompt)
        responses.append((response.astype(np.int32), draws.copy()))
        self._tokens += len(response)
        if len(responses) > REMEMBERED:
            self._tokens -= len(responses.popleft()[0])
        while self._tokens > self._most_tokens:
            _, forgotten = self._of_prompt.popitem(last=False)
            self._tokens -= sum(len(tokens) for tokens, _ in forgotten)

    def of(self, prompt: bytes) -> Sequence[tuple[Array, Array]]:
        """Return the responses with their draws."""
        return tuple(self._of_prompt.get(prompt, ()))


class Book:
    """The texts of one prompt, in which compiled code finds continuations of a row's last tokens; see drafts.c."""

    def __init__(self, functions: Any) -> None:
        self._functions, self.rows = functions, 0
        """`rows` counts the rows in slots that use it."""
        self.address: int = functions.open_book()
        finalize(self, functions.close_book, self.address)

    def read(self, text: Array, before: Array, draws: Array | None = None) -> None:
        """Add a text (T,) with the tokens before it (DEPTH,), and the draws (T, 3) of a text that was drawn."""
        before, text = (np.ascontiguousarray(ids, np.int64) for ids in (before, text))
        draws = None if draws is None else np.ascontiguousarray(draws, np.float32)
        done = self._functions.read_text(
            self.address,
            None,
            None,
            before.ctypes.data,
            text.ctypes.data,
            None if draws is None else draws.ctypes.data,
            0,
            len(text),
        )
        if not done:
            raise MemoryError("no memory for the texts from which next tokens are guessed")


class Guesses:
    """The guesses of next tokens for the rows in an engine's slots."""

    def __init__(self, slots: int) -> None:
        self._functions = library("drafts", torch.float32)
        self.available = self._functions is not None
        self._earlier, self._books = EarlierResponses(), dict[bytes, Book]()
        self._prompts = dict[int, bytes]()
        """The prompt of each slot's row."""
        self._pointers, self._preceding = np.zeros(slots, np.int64), np.zeros((slots, DEPTH), np.int64)
        self._read = np.zeros(slots, np.int64)
        """Drawn tokens of each slot's row that its book has."""
        self.cells = torch.ones(*CELLS, 2)
        # Before any measurement, a guess is assumed to be as reliable as its token's share of those that came.
        shares = [number / SHARES for number in range(SHARES)]
        self.cells[..., 0] = torch.tensor([*shares, *INSIDE, *OUTSIDE])[None, :, None]
        # Of the best guesses as often as their cells say.
        self.bins = torch.stack([1 - 2 ** (-(torch.arange(BINS) + 0.5) / 2), torch.ones(BINS)], 1)

    def begin(self, slot: int, request: Request) -> None:
        """Prepare a slot for a row that starts or resumes."""
        ids = request.prompt.numpy()
        prompt_length = len(ids) - request.continues
        name = ids[:prompt_length].tobytes()
        if (book := self._books.get(name)) is None:
            book = self._books[name] = Book(self._functions)
            if responses := self._earlier.of(name):
                # As one text: the last tokens of the prompt separate consecutive responses.
                before = ids[max(0, prompt_length - DEPTH) : prompt_length]
                text = np.concatenate([part for response, _ in responses for part in (before, response)])
                undrawn = np.zeros((len(before), 3), np.float32)
                draws = np.concatenate([part for _, drawn in responses for part in (undrawn, drawn)])
                book.read(text, last_tokens(ids[:0]), draws)
            start = max(0, prompt_length - PROMPT_TOKENS)
            book.read(ids[start:prompt_length], last_tokens(ids[:start]))
        if request.continues:
            book.read(ids[prompt_length:], last_tokens(ids[:prompt_length]))
        book.rows += 1
        self._prompts[slot], self._pointers[slot], self._read[slot] = name, book.address, 0
        self._preceding[slot] = last_tokens(ids)

    def end(self, slots: Sequence[int], states: SlotStates) -> None:
        """Release slots; the other rows of their prompts profit from what theirs have drawn."""
        names = {slot: self._prompts.pop(slot) for slot in slots}
        for name in names.values():
            self._books[name].rows -= 1
        used = [slot for slot, name in names.items() if self._books[name].rows]
        self._read_rows(torch.tensor(used, dtype=torch.int64), states)
        self._books = {name: book for name, book in self._books.items() if book.rows}

    def remember(self, request: Request, response: Array, draws: Array) -> None:
        """Store a complete response (T,) for later epochs, with its draws (T, 3)."""
        prompt = request.prompt.numpy()
        if request.continues:
            prompt, earlier = np.split(prompt, [len(prompt) - request.continues])
            response = np.concatenate([earlier, response])
            draws = np.concatenate([np.zeros((len(earlier), 3), np.float32), draws])
        self._earlier.add(prompt.tobytes(), response, draws)

    def of(self, slots: Tensor, states: SlotStates) -> tuple[Tensor, Tensor]:
        """Return guesses of the next tokens of the rows in `slots` (R,), (R, K), and the probability that all up to
        each are right, (R, K) float32.
        """
        self._read_rows(slots, states)
        drafts, probabilities = torch.empty((len(slots), LONGEST), dtype=torch.int64), torch.empty(len(slots), LONGEST)
        of_slots = slots, states.drawn, states.limit, states.key, states.first_draw
        self._functions.draft(
            *self._memory(states),
            *(address(integers, torch.int64) for integers in (*of_slots, drafts)),
            address(probabilities, torch.float32),
            len(slots),
            states.tokens.shape[1],
            LONGEST,
            LEAST,
        )
        return drafts, probabilities

    def _read_rows(self, slots: Tensor, states: SlotStates) -> None:
        """Add what the rows in `slots` (R,) have drawn since the last call to their books."""
        done = self._functions.read_rows(
            *self._memory(states),
            address(states.per_token[DRAWS], torch.float32),
            address(slots, torch.int64),
            self._read.ctypes.data,
            address(states.drawn, torch.int64),
            len(slots),
            states.tokens.shape[1],
        )
        if not done:
            raise MemoryError("no memory for the texts from which next tokens are guessed")

    def _memory(self, states: SlotStates) -> tuple[int, ...]:
        """Return the first arguments of `read_rows` and `draft`."""
        measured = (address(numbers, torch.float32) for numbers in (self.cells, self.bins))
        return self._pointers.ctypes.data, *measured, self._preceding.ctypes.data, address(states.tokens, torch.int64)

    def clear(self) -> None:
        """Forget the rows; responses are kept."""
        self._books.clear()
        self._prompts.clear()


def last_tokens(ids: Array) -> Array:
    """Return the last DEPTH of these ids, (DEPTH,), padded with -1 at the front."""
    last, known = np.full(DEPTH, -1), ids[-DEPTH:]
    last[DEPTH - len(known) :] = known
    return last


class PassCosts:
    """Seconds of a pass by its tokens, with guesses and without: the median of the last measurements."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool], deque[float]] = {}
        self._medians: dict[tuple[int, bool], float] = {}
        """Of sizes that were measured more than once; those measured last stand at the end."""
        self._measured: dict[tuple[int, bool], int] = {}
        self._passes = 0

    def add(self, size: int, guessed: bool, seconds: float) -> None:
        key = size, guessed
        self._passes += 1
        measurements = self._seconds.setdefault(key, deque(maxlen=MEASURED))
        measurements.append(seconds)
        self._measured[key] = self._passes
        self._medians.pop(key, None)
        if len(measurements) > 1:
            self._medians[key] = median(measurements)
        while self._medians and self._measured[oldest := next(iter(self._medians))] <= self._passes - VALID:
            del self._medians[oldest]

    def seconds(self, size: int, guessed: bool) -> float:
        """Estimate a pass's seconds; one not measured recently is estimated from others, so that it is tried."""
        if (known := self._medians.get((size, guessed))) is not None:
            return known
        if not self._medians:
            return float(size)
        # From the nearest size; half of a pass is assumed not to depend on its size.
        near = min(self._medians, key=lambda key: (abs(key[0] - size), key[1] != guessed))
        return self._medians[near] * (1 + size / near[0]) / 2


@cache
def sizes_of(multiple: int, most: int) -> tuple[int, ...]:
    """Return the sizes of passes with guesses; they are few, so that each is measured often."""
    steps = [round(multiple * factor * 2**power) for power in range(1, 12) for factor in (1, 1.5)]
    return tuple(size for size in (multiple, *steps) if size <= most)


Costs = Callable[[int, bool], float]
"""A function that returns a pass's seconds from its number of tokens and whether some are guesses."""


def useful_guesses(drawn: Sequence[float], rows: int, costs: Costs, multiple: int) -> int:
    """Return how many guesses a pass of `rows` rows takes to draw most tokens per second; 0 if none are worth it.

    Args:
        drawn: The tokens that a pass is expected to draw with no guess, with the most probable one, two and so on.
        rows: Rows of the pass.
        costs: A pass's seconds.
        multiple: A pass's size is a multiple of this number of tokens.
    """
    best, rate, most = 0, GAIN * rows / costs(-(-rows // multiple) * multiple, False), len(drawn) - 1
    for size in sizes_of(multiple, PASS_TOKENS):
        chosen = min(size - rows, most)
        if chosen > 0 and drawn[chosen] / costs(size, True) > rate:
            best, rate = chosen, drawn[chosen] / costs(size, True)
        if chosen == most:
            break
    return best


class Speculation:
    """Chooses the guesses of each pass, and measures their gain."""

    def __init__(self, slots: int, multiple: int) -> None:
        """Make one for passes of a multiple of `multiple` tokens."""
        self.guesses, self.measured, self._multiple = Guesses(slots), PassCosts(), multiple
        self.costs: Costs = self.measured.seconds
        self._wait = self._left = 0
        """Passes between two considerations of guesses, and until the next one."""
        self._plain, self._credit, self._passes = 1.0, CREDIT, 0
        """Seconds of the present pass without guesses; passes that guesses may cost before they have to wait; passes
        since the credit was renewed.
        """
        self._unread: dict[int, Request] = {}
        """The rows in slots whose texts are read only when few enough rows are left."""

    def begin(self, slot: int, request: Request) -> None:
        """Record a row that starts or resumes in a slot; its guesses are considered in the next pass."""
        self._unread[slot] = request
        self._left = 0

    def end(self, ended: Mapping[int, Request], states: SlotStates, aborted: bool) -> None:
        """Release the slots of rows that end; complete responses are stored."""
        self.guesses.end([slot for slot in ended if self._unread.pop(slot, None) is None], states)
        if aborted:
            return
        tokens, draws = states.tokens.numpy(), states.per_token[DRAWS].numpy()
        for (slot, request), count in zip(ended.items(), states.drawn[list(ended)].tolist(), strict=True):
            self.guesses.remember(request, tokens[slot, :count], draws[slot, :count])

    def clear(self) -> None:
        """Forget the rows; responses are kept."""
        self._unread.clear()
        self.guesses.clear()

    def try_again(self) -> None:
        """Let guesses cost some passes again, because the weights are new, and with them often the texts."""
        if self._passes >= SETTLED:
            self._credit, self._passes = max(self._credit, CREDIT), 0
        self._wait = self._left = 0

    def choose(self, slots: Tensor, states: SlotStates) -> tuple[Tensor, Tensor] | None:
        """Return the guesses (R, K) of the rows in `slots` (R,) and the number that a pass takes of each row's, (R,);
        None for no guesses.
        """
        rows = len(slots)
        if rows > FEW:
            return None
        self._plain = self.costs(-(-rows // self._multiple) * self._multiple, False)
        if self._credit < 0:
            return None
        if self._left:
            self._left -= 1
            return None
        perfect = range(rows, rows * (1 + LONGEST) + 1)
        if not useful_guesses(perfect, rows, self.costs, self._multiple):
            # The rows use the full machine: even right guesses would not be worth their cost.
            self._left = RECHECK
            return None
        for slot, request in self._unread.items():
            self.guesses.begin(slot, request)
        self._unread.clear()
        drafts, probabilities = self.guesses.of(slots, states)
        of_all = probabilities.numpy().ravel()
        order = np.argsort(-of_all, kind="stable")[: np.count_nonzero(of_all)]
        drawn = [float(rows), *(rows + np.cumsum(of_all[order], dtype=np.float64)).tolist()]
        chosen = useful_guesses(drawn, rows, self.costs, self._multiple)
        if not chosen:
            self._wait = min(MOST_WAIT, 2 * self._wait + 1)
            self._left = self._wait
            return None
        self._wait = 0
        # A row's guesses are in order: none is more probable than the previous one.
        counts = np.bincount(order[:chosen] // LONGEST, minlength=rows)
        return drafts, torch.from_numpy(counts)

    def observe(self, size: int, rows: int, guesses: int, accepted: int, seconds: float, choosing: float) -> None:
        """Record a pass of `size` tokens with this thread's seconds, and those in which its guesses were chosen, or
        none were.
        """
        self.measured.add(size, guesses > 0, seconds)
        self._passes += 1
        saved = (rows + accepted) / rows - seconds / self._plain if guesses else LOSS
        self._credit = min(2 * CREDIT, self._credit + saved - choosing / self._plain)
