"""The prompt loader and the rows of admitted prompts: seeded, weighted over sources, resumable. Its state is one
number.

Each admitted prompt becomes a group of rows, one per sample; no later stage creates rows.

number n ──weighted_draw──▶ source s, and how many before n came from s ──permutation of (seed, s, epoch)──▶ example
                                  ╰──curriculum: the measured success──▶ example

A prompt is a function of its admission number. `peek` works for any number without the earlier ones, so that each rank
of a distributed run draws only its slice under one global shuffle, and a resumed run continues exactly. With a
curriculum the process that admits draws the examples, and sends them with their numbers.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.data.chat import TEMPLATE
from braidrl.data.curricula import Curriculum
from braidrl.data.packing import equal_share
from braidrl.data.prompts import LoadedSource
from braidrl.data.rows import Column, Objects, Rows
from braidrl.data.sources import Example
from braidrl.data.tables import RESPONSES
from braidrl.data.vision import ImageSpan, image_columns, moved
from braidrl.errors import UserError

# Shares of the weights are integer multiples of 1/UNIT, so that counting is exact for any admission number.
UNIT = 1 << 32
LARGE = 1_000_000
"""Above this number of examples a permutation is computed element by element: a whole one takes 8 bytes of memory per
example.
"""
ROUNDS = 4


@dataclass(frozen=True, eq=False)
class Admitted:
    """One admitted prompt.

    `number` counts admissions through the whole run and becomes the rows' `group`. `index` is the example's position
    among the kept examples of its source. `prompt` (T,) int64 are token ids. `responses` has the responses of the data,
    none, one or two, of a pair the better first: token ids (T,) int64, and the mask of trained tokens, (T,) bool.
    """

    number: int
    source: int
    epoch: int
    index: int
    example: Example
    prompt: Tensor
    responses: tuple[tuple[Tensor, Tensor], ...] = ()
    images: tuple[tuple[ImageSpan, ...], ...] | None = None
    """The images of the prompt, or of the row with each response of the data; None for a text-only model."""

    @staticmethod
    def of(source: LoadedSource, number: int, position: int, epoch: int, index: int) -> "Admitted":
        """Make the admission of example `index` of a source, which is number `position` among the run's sources."""
        responses = tuple(r for name in RESPONSES if (r := source.response(index, name)) is not None)
        prompt, spans, images = source.prompt(index), source.images(index), None
        if spans is not None:
            first, *others = spans
            images = tuple((*first, *moved(spans_of_response, len(prompt))) for spans_of_response in others or [[]])
        return Admitted(number, position, epoch, index, source[index], prompt, responses, images)


class Admissions:
    """The order of admissions, by number alone; it needs only the sizes of the sources."""

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int = 0,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Start at the first admission. Raises UserError if there is no source or an empty one."""
        if not sizes or not all(sizes):
            raise UserError("there are no prompts to draw from; give data.train a file with at least one")
        self.seed, self.shuffle, self.weights, self.curriculum = seed, shuffle, list(weights), curriculum
        self.admitted = 0
        """Admission number of the next prompt."""
        self.epoch_size = sum(sizes)
        """Number of prompts of all sources, which is one epoch if weights are proportional to sizes."""
        self._identity = {"seed": seed, "shuffle": shuffle, "prompts": list(sizes), "weights": list(weights)}
        if curriculum is not None:
            self._identity["curriculum"] = curriculum.config.model_dump(mode="json")

    def is_ready(self, iteration: int) -> bool:
        """Return True if the batch of an iteration may be drawn."""
        return self.curriculum is None or self.curriculum.is_ready(iteration)

    def begin(self, iteration: int) -> None:
        """Start the batch of an iteration."""
        if self.curriculum is not None:
            self.curriculum.begin(iteration)

    def advance(self, count: int) -> range:
        """Advance by `count` prompts, and return their admission numbers."""
        numbers = range(self.admitted, self.admitted + count)
        self.admitted += count
        if self.curriculum is not None:
            for number in numbers:
                self.curriculum.draw(number, weighted_draw(number, self.weights, self.seed)[0])
        return numbers

    def examples(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return (source, index) of each admitted prompt if a curriculum has drawn it; otherwise an empty list."""
        return [] if self.curriculum is None else [self.curriculum.drawn[number][:2] for number in numbers]

    def measure(self, iteration: int, index: Rows) -> dict[str, float]:
        """Pass the index columns of a finished iteration to the curriculum, if there is one; return its metrics."""
        return {} if self.curriculum is None else self.curriculum.measure(iteration, index)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON; a loader over the same data continues from it exactly."""
        learned = {} if self.curriculum is None else {"curriculum": self.curriculum.state()}
        return {"admitted": self.admitted, "data": dict(self._identity), **learned}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises UserError if seed, sources or weights differ."""
        for name in {**self._identity, **state["data"]}:
            before, value = state["data"].get(name), self._identity.get(name)
            if before != value:
                raise UserError(
                    f"the checkpoint was made with {name} {before} of the training data and this run has {value}; "
                    "resume with the same data settings, or start a new run from its model"
                )
        self.admitted = state["admitted"]
        if self.curriculum is not None:
            self.curriculum.restore(state["curriculum"])


class PromptLoader(Admissions):
    """A loader that draws prompts from sources in proportion to their weights, shuffled anew in each epoch."""

    def __init__(
        self, sources: Sequence[LoadedSource], seed: int = 0, shuffle: bool = True, curriculum: Curriculum | None = None
    ) -> None:
        """Start at the first admission. Raises UserError if there is no source or an empty one."""
        self.sources = list(sources)
        weights = [source.weight for source in sources]
        super().__init__([len(source) for source in sources], weights, seed, shuffle, curriculum)

    def peek(self, numbers: Sequence[int], examples: Sequence[tuple[int, int]] = ()) -> list[Admitted]:
        """Return the prompts with these admission numbers, past or future, without advancing.

        `examples` are those that a curriculum has drawn for them.
        """
        admitted = []
        for number, (position, index) in zip(numbers, examples, strict=False):
            admitted.append(Admitted.of(self.sources[position], number, position, 0, index))
        for number in numbers if not examples else ():
            position, draw = weighted_draw(number, self.weights, self.seed)
            source = self.sources[position]
            epoch, index = divmod(draw, len(source))
            if self.shuffle:
                index = shuffled(self.seed, position, epoch, len(source), index)
            admitted.append(Admitted.of(source, number, position, epoch, index))
        return admitted


def eval_rows(
    source: LoadedSource, samples: int, max_prompts: int | None = None, number: int = 0, rank: int = 0, size: int = 1
) -> Rows:
    """Return a held-out set as rows, `samples` of each of `max_prompts` or of a rank's share; source is `number`, group
    the position.
    """
    count = len(source) if max_prompts is None else min(max_prompts, len(source))
    share = equal_share(count, rank, size)
    return as_rows([Admitted.of(source, i, number, 0, i) for i in share], samples) if share else Rows({})


def as_rows(admitted: Sequence[Admitted], samples: int) -> Rows:
    """Return the rows of admitted prompts, in order; the samples of a group are consecutive.

    Columns: source, group, sample, prompt_length (B,) int64; prompt, int64 token ids; metadata: the example's fields,
    "prompt", "answer", "tools" and arguments of the chat template; with responses of the data also response, int64
    token ids, and response_mask, bool, the trained tokens; for a multimodal model also images, their spans,
    and image_tokens.

    A pair of responses always makes two rows: sample 0 is the chosen one and sample 1 the rejected one.
    """
    response_count = len(admitted[0].responses) if admitted else 0
    samples = 2 if response_count == 2 else samples
    prompt_of_row = torch.arange(len(admitted)).repeat_interleave(samples)
    prompts = Ragged.from_rows([a.prompt for a in admitted], torch.int64).take(prompt_of_row)
    metadata = []
    for example in (a.example for a in admitted):
        rendered = {name: value for name, value in (("tools", example.tools), (TEMPLATE, example.arguments)) if value}
        metadata.append(example.metadata | {"prompt": example.prompt, "answer": example.answer} | rendered)
    columns: dict[str, Column] = {
        "source": torch.tensor([a.source for a in admitted], dtype=torch.int64)[prompt_of_row],
        "group": torch.tensor([a.number for a in admitted], dtype=torch.int64)[prompt_of_row],
        "sample": torch.arange(samples).repeat(len(admitted)),
        "prompt": prompts,
        "prompt_length": prompts.lengths,
        "metadata": Objects(tuple(metadata)).take(prompt_of_row),
    }
    if admitted and admitted[0].images is not None:
        images = [spans for a in admitted for spans in a.images or ()]
        of_rows = range(len(images)) if response_count == 2 else prompt_of_row.tolist()
        columns |= image_columns([images[number] for number in of_rows])
    if response_count:
        responses = [r for a in admitted for r in a.responses]
        rows = torch.arange(len(responses)) if response_count == 2 else prompt_of_row
        columns["response"] = Ragged.from_rows([ids for ids, _ in responses], torch.int64).take(rows)
        columns["response_mask"] = Ragged.from_rows([trained for _, trained in responses], torch.bool).take(rows)
    return Rows(columns)


def join_texts(rows: Rows, texts: PromptLoader, samples_per_prompt: int) -> Rows:
    """Return the rows with one pre-training text each, `ptx_tokens` int64 and `ptx_length`, by (group, sample) in a
    seeded order.
    """
    numbers: Tensor = rows["group"] * samples_per_prompt + rows["sample"]
    tokens = [admitted.prompt for admitted in texts.peek(numbers.tolist())]
    joined = Ragged.from_rows(tokens, torch.int64)
    return rows.with_columns({"ptx_tokens": joined, "ptx_length": joined.lengths})


def weighted_draw(number: int, weights: Sequence[float], seed: int) -> tuple[int, int]:
    """Return the source of a number 0, 1, 2, ..., and the count of earlier numbers of that source, in proportion to
    `weights`.

    Of the first n numbers, source 0 has floor((n * share + phase) / UNIT), and the other sources share the remaining
    ones in the same way. The spread is even, closer to the weights than independent draws, and can be counted without
    iteration. The seed sets the phases.
    """
    for source, weight in enumerate(weights[:-1]):
        share = min(UNIT - 1, max(1, round(UNIT * weight / sum(weights[source:]))))
        phase = seeded_key(seed, "source", source) % UNIT
        before = (number * share + phase) // UNIT
        if ((number + 1) * share + phase) // UNIT > before:
            return source, before
        number -= before
    return len(weights) - 1, number


def shuffled(seed: int, source: int, epoch: int, size: int, index: int) -> int:
    """Return the example at position `index` of an epoch's permutation of a source."""
    if size <= LARGE:
        return int(permutation(seed, source, epoch, size)[index])
    # A Feistel network permutes the numbers with an even count of bits; a result beyond the size goes through it again.
    half = (size - 1).bit_length() + 1 >> 1
    while True:
        left, right = index >> half, index & ((1 << half) - 1)
        for number in range(ROUNDS):
            key = seeded_key(seed, "place", source, epoch, number, right)
            left, right = right, left ^ (key & ((1 << half) - 1))
        index = left << half | right
        if index < size:
            return index


# A step may include the end of an epoch in each source; older permutations are not needed again.
@lru_cache(maxsize=32)
def permutation(seed: int, source: int, epoch: int, size: int) -> np.ndarray:
    """Return the permutation (size,) int64 of a source's examples in one epoch; Philox's stream is stable between numpy
    releases.
    """
    keys = np.random.Philox(key=seeded_key(seed, "epoch", source, epoch)).random_raw(size)
    return np.argsort(keys, kind="stable")


def seeded_key(seed: int, purpose: str, *counters: int) -> int:
    """Hash all arguments to 128 bits."""
    text = f"{purpose}:{seed}:{':'.join(map(str, counters))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
