"""Counts the operations and bytes that a decoder cannot do without, from its sizes and its rows' lengths.

Of N tokens, P of which are predicted, a forward pass takes 2 operations for each parameter in a matrix and token, and 4·H·D per layer
for each pair of a query and a key that it sees, with H heads of D numbers (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B, where
causal masks are not made use of: a row of T tokens has T² pairs there, and T·(T + 1)/2 here). A backward pass takes as many for the
gradients of activations and as many again for those of weights. What is computed twice to save memory does not count.

Decoding reads all matrices in each step, and the keys and values of everything before for each row (Pope et al., arXiv 2211.05102,
section 2).
"""

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from braidrl.data.rows import Rows
from braidrl.training.compute.shared_prompts import families_of
from braidrl.training.memory.footprint import ModelSizes


class MatrixSizes(NamedTuple):
    """What operations and bytes follow from."""

    body: int
    """Parameters that each token is multiplied with."""
    head: int
    """Parameters of the output layer, which a token is multiplied with where one is predicted; 0 for a scalar head."""
    queries: int
    """Numbers of a token's queries in all layers."""
    cached: int
    """Numbers of a token's keys and values in all layers."""

    @staticmethod
    def of(sizes: ModelSizes, parameters: int, scalar: bool) -> "MatrixSizes":
        """Return the sizes of a model.

        Args:
            sizes: From its configuration.
            parameters: All that it has, tied ones once.
            scalar: True for a critic or a reward model.
        """
        embedding, layers = sizes.vocab_size * sizes.hidden_size, sizes.num_hidden_layers
        head = 0 if scalar else embedding
        looked_up = 0 if sizes.tie_word_embeddings and not scalar else embedding
        return MatrixSizes(
            parameters - looked_up - head, head, layers * sizes.num_attention_heads * sizes.head_dim,
            2 * layers * sizes.num_key_value_heads * sizes.head_dim,
        )  # fmt: skip


class TokenCounts(NamedTuple):
    """What goes through a model in one pass: tokens, those among them of which something is predicted, and pairs of query and key."""

    tokens: float
    predicted: float
    pairs: float

    @staticmethod
    def of(rows: Rows, shared_prompts: bool = False) -> "TokenCounts":
        """Count rows; with `shared_prompts` a prompt goes through the model once for all rows that begin with it."""
        lengths = rows["sequence_lengths"].values.tolist()
        tokens, pairs = sum(lengths), sum(map(_pairs, lengths))
        for family in (families_of(rows) or []) if shared_prompts else []:
            again = len(family.rows) - 1
            tokens, pairs = tokens - again * family.prompt, pairs - again * _pairs(family.prompt)
        return TokenCounts(tokens, int(rows["action_mask"].values.sum()), pairs)


def _pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def forward_operations(sizes: MatrixSizes, counts: TokenCounts) -> float:
    """Return the operations of a forward pass."""
    products = 2.0 * (sizes.body * counts.tokens + sizes.head * counts.predicted)
    return products + 4.0 * sizes.queries * counts.pairs


def training_operations(sizes: MatrixSizes, counts: TokenCounts, frozen: bool) -> float:
    """Return the operations of a forward and a backward pass; with `frozen` weights, under adapters, gradients go through them alone."""
    return (2.0 if frozen else 3.0) * forward_operations(sizes, counts)


def decoding_bytes(sizes: MatrixSizes, element_bytes: int, steps: float, seen: float) -> float:
    """Return the bytes that decoding reads.

    Args:
        sizes: The model's.
        element_bytes: Of a weight, a key and a value.
        steps: Decode steps, in each of which all weights are read once.
        seen: Tokens whose keys and values are read, summed over rows and steps.
    """
    return element_bytes * (steps * (sizes.body + sizes.head) + seen * sizes.cached)


def tokens_seen(before: int, drawn: int) -> int:
    """Return how many tokens a row sees while `drawn` ones are drawn after those `before` them, summed over its steps."""
    return drawn * before + drawn * (drawn - 1) // 2


class Decoding(NamedTuple):
    """One engine's way through its rows: steps until the last ends, and slots that take part in them, summed over steps."""

    steps: int
    slot_steps: int


def decoding(responses: npt.NDArray[np.int64], slots: int, multiple: int = 1) -> Decoding:
    """Return how an engine decodes responses of so many tokens in `slots` slots that it fills again as they become free.

    Args:
        responses: tokens by row, in the order in which they begin, (R,).
        multiple: a step computes a multiple of so many rows.
    """
    busy: list[int] = []
    ends: list[int] = []
    for tokens in responses.tolist():
        start = heapq.heappop(busy) if len(busy) >= slots else 0
        heapq.heappush(busy, start + tokens)
        ends.append(start + tokens)
    last = np.sort(np.array(ends, dtype=np.int64))
    # Slots are full until the last row has begun; from then on they empty in the order of their ends.
    tail = last[-min(slots, len(last)) :]
    counts = np.arange(len(tail), 0, -1)
    spans = np.diff(tail, prepend=0)
    return Decoding(int(last[-1]), int((spans * (-(-counts // multiple) * multiple)).sum()))
