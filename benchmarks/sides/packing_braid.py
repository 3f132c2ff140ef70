"""One optimizer step on rows of given lengths: packed, as Braid trains; or padded to the longest row of each
micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from benchmarks.sides.workers import worker_of
from benchmarks.turns import Turn
from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import Rows
from braidrl.observe.metrics import Sums
from braidrl.training.compute.packed import Packed, pack
from braidrl.training.decoders.routing import Routing
from braidrl.training.objective import Objective, denominators
from braidrl.training.roles.worker import MicroBatch, RoleWorker

MICRO_BATCH_TOKENS = 4096


def prepare(case: Mapping[str, Any]) -> Turn:
    kind = PaddedWorker if case["way"] == "padded" else RoleWorker
    worker = worker_of(kind, case, max_tokens_per_device=MICRO_BATCH_TOKENS)
    objective = Objective.of("actor", {"loss": "clip"})
    if isinstance(worker, PaddedWorker):
        worker.rows_at_once = case["padded_rows"]
    rows = rows_of(case["lengths"], case["vocabulary"])

    def turn() -> dict[str, float]:
        worker.forward_backward(objective, rows, Sums())
        worker.optim_step(denominators(rows), 1)
        return {"tokens": sum(case["lengths"])}

    turn()
    return turn


class PaddedWorker(RoleWorker):
    """The same worker with transformers' own forward pass on padded rows."""

    rows_at_once = 16

    def load_model(self, folder: Path, on_meta: bool = False) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype, attn_implementation="sdpa")

    def micro_batches(
        self, rows: Rows, whole_groups: bool = False, may_share: bool = True, trains: bool = False
    ) -> list[MicroBatch]:
        """Pack a fixed number of rows at a time, in the given order."""
        starts = range(0, len(rows), self.rows_at_once)
        plan = [list(range(start, min(start + self.rows_at_once, len(rows)))) for start in starts]
        return [MicroBatch(numbers, part := rows.take(numbers), pack(part, self.device)) for numbers in plan]

    def hidden_states(self, packed: Packed, routing: Routing | None = None) -> Tensor:
        """Return the hidden states (N, D) of the tokens that are not padding."""
        sequences = packed.input_ids.split(list(packed.sequence_lengths))
        ids = pad_sequence(list(sequences), batch_first=True)
        mask = pad_sequence([torch.ones_like(part) for part in sequences], batch_first=True)
        hidden: Tensor = self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return hidden[mask.bool()]


def rows_of(lengths: list[int], vocabulary: int) -> Rows:
    """Return rows of random tokens; the first third of each is the prompt."""
    generator, count = torch.Generator().manual_seed(1), len(lengths)
    each = torch.tensor(lengths)
    prompts = (each // 3).clamp(min=1)
    mask = torch.cat([torch.arange(n) >= p for n, p in zip(lengths, prompts.tolist(), strict=True)])
    return Rows(
        {
            "source": torch.zeros(count, dtype=torch.int64),
            "group": torch.arange(count),
            "sample": torch.zeros(count, dtype=torch.int64),
            "length": each,
            "action_tokens": each - prompts,
            "advantage": torch.randn(count, generator=generator),
            "tokens": Ragged.from_lengths(torch.randint(1, vocabulary, (int(each.sum()),), generator=generator), each),
            "action_mask": Ragged.from_lengths(mask, each),
            "sequence_lengths": Ragged.from_lengths(each, torch.ones_like(each)),
        }
    )
