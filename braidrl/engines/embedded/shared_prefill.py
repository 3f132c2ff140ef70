"""Shared prefill: each prompt is computed once for all rows that begin with it, and kept until the last of these rows has a slot.

All ids of a prompt except the last go through the model here; a slot decodes the last one first. So every token is drawn in a decode step,
at the shape that all rows share.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from braidrl.training.compute.attention import PackedSequences
from braidrl.training.compute.slots import PrefillSequences, Prefix, round_up
from braidrl.training.decoders.body import run_body

ROW_MULTIPLE = 16
"""Matrix products have a multiple of this many rows: with fewer, a CPU's kernels round the same row differently."""
PREFILL_TOKENS = 8192
"""Prompt tokens in one forward pass; a longer prompt goes alone."""


class Prompts:
    """The keys and values of the prompts of waiting rows, without each prompt's last token."""

    def __init__(self) -> None:
        self._kept: dict[bytes, Prefix] = {}
        self._waiting: Counter[bytes] = Counter()
        self.computed_tokens = 0

    def expect(self, prompt: Tensor) -> None:
        """Count one more waiting row with this prompt."""
        self._waiting[prompt_key(prompt)] += 1

    def forget(self, prompt: Tensor) -> None:
        """Count one waiting row less with this prompt; after the last row, free its keys and values."""
        name = prompt_key(prompt)
        self._waiting[name] -= 1
        if not self._waiting[name]:
            del self._waiting[name]
            self._kept.pop(name, None)

    def discard(self) -> None:
        """Free all keys and values because the weights changed; they are recomputed when needed."""
        self._kept.clear()

    def compute(self, model: PreTrainedModel, prompts: Iterable[Tensor]) -> None:
        """Compute the keys and values of prompts that have none yet, several in one packed forward."""
        missing = {prompt_key(prompt): prompt[:-1] for prompt in prompts if len(prompt) > 1}
        missing = {name: ids for name, ids in missing.items() if name not in self._kept}
        parts: list[dict[bytes, Tensor]] = []
        held = PREFILL_TOKENS
        for name, ids in missing.items():
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
            self._kept |= dict(zip(part, keeping.prefixes(len(lengths)), strict=True))
            self.computed_tokens += sum(lengths)

    def prefix(self, prompt: Tensor) -> Prefix | None:
        """Return this prompt's keys and values; None for a prompt of a single token."""
        return self._kept[prompt_key(prompt)] if len(prompt) > 1 else None


def prompt_key(prompt: Tensor) -> bytes:
    """Return the prompt's ids as a key, equal for rows with equal prompts, also across groups."""
    return prompt.numpy().tobytes()
