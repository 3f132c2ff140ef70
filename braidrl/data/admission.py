"""Where rows are born: each admitted prompt becomes a group of rows, one per sample. No later stage creates rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.data.loader import Admitted, PromptLoader
from braidrl.data.prompts import LoadedSource
from braidrl.data.rows import Column, Objects, Rows


def admit(loader: PromptLoader, groups: int, samples_per_prompt: int) -> Rows:
    """Return the next `groups` prompts as groups * samples_per_prompt rows; `group` is the admission number."""
    return as_rows(loader.take(groups), samples_per_prompt)


def eval_rows(source: LoadedSource, samples: int, max_prompts: int | None = None, number: int = 0) -> Rows:
    """Return every prompt of a held-out set, or the first `max_prompts`, in file order; `group` is its place in the file, `source` is
    `number`.
    """
    count = len(source) if max_prompts is None else min(max_prompts, len(source))
    return as_rows([Admitted.of(source, i, number, 0, i) for i in range(count)], samples)


def as_rows(admitted: Sequence[Admitted], samples: int) -> Rows:
    """Make rows of admitted prompts, in their order, the samples of a group one after the other.

    Writes source, group, sample, prompt_length (B,) int64; prompt, int64 token ids; metadata, with "prompt" and "answer" as the
    file has them in place of any fields of these names; response, int64 token ids, where the sources were read with it. A pair of
    given responses makes two rows whatever `samples` is: sample 0 has the chosen one and sample 1 the rejected.
    """
    if any(a.rejected is not None for a in admitted):
        samples = 2
    each = torch.arange(len(admitted)).repeat_interleave(samples)
    prompts = Ragged.from_rows([a.prompt for a in admitted], torch.int64).take(each)
    metadata = [a.example.metadata | {"prompt": a.example.prompt, "answer": a.example.answer} for a in admitted]
    columns: dict[str, Column] = {
        "source": torch.tensor([a.source for a in admitted], dtype=torch.int64)[each],
        "group": torch.tensor([a.number for a in admitted], dtype=torch.int64)[each],
        "sample": torch.arange(samples).repeat(len(admitted)),
        "prompt": prompts,
        "prompt_length": prompts.lengths,
        "metadata": Objects(tuple(metadata)).take(each),
    }
    better = [a.response for a in admitted if a.response is not None]
    worse = [a.rejected for a in admitted if a.rejected is not None]
    if worse:
        both = [response for pair in zip(better, worse, strict=True) for response in pair]
        columns["response"] = Ragged.from_rows(both, torch.int64)
    elif better:
        columns["response"] = Ragged.from_rows(better, torch.int64).take(each)
    return Rows(columns)


def join_texts(rows: Rows, texts: PromptLoader, samples_per_prompt: int) -> Rows:
    """Add the columns `ptx_tokens`, int64, and `ptx_length`: one pre-training text for each row, in the texts' own seeded order.

    Row (group, sample) gets text group * samples_per_prompt + sample, whichever rows are asked for together and in any order.
    """
    numbers: Tensor = rows["group"] * samples_per_prompt + rows["sample"]
    tokens = [admitted.prompt for admitted in texts.peek(numbers.tolist())]
    joined = Ragged.from_rows(tokens, torch.int64)
    return rows.with_columns({"ptx_tokens": joined, "ptx_length": joined.lengths})
