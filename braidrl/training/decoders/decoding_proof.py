"""The decoding proof: on a model's tiny twin, the embedded engine's log-probs must equal the trainer's."""

import torch
from torch import Tensor

from braidrl.errors import first_line
from braidrl.training.compute.attention import PackedSequences
from braidrl.training.compute.slots import PrefillSequences, SlotCache, SlotStep
from braidrl.training.decoders.body import ForwardPlan, run_body
from braidrl.training.decoders.cohorts import Cohorts
from braidrl.training.decoders.head import logits_of
from braidrl.training.decoders.proof import BOUND, FAILURES, Finding, Twin, distance

SLOTS = 16
PROMPTS = (2, 9, 8, 1, 1, 9, 5, 1)
"""Prompt tokens of each of the twin's rows."""


@torch.no_grad()
def decoding_finding(twin: Twin, plan: ForwardPlan) -> Finding:
    """Decode the twin's rows token by token, and compare with single rows under transformers."""
    name = "embedded engine equals trainer: prefill and decode"
    model = twin.model(plan)
    try:
        found = decoded_by_cohorts(model, twin) if plan.by_rows else decoded_from_slots(model, twin)
    except FAILURES as error:
        return Finding(name, float("inf"), BOUND, first_line(error))
    return Finding(
        name, distance(found, [row[prompt - 1 :] for row, prompt in zip(twin.alone[0], PROMPTS, strict=True)]), BOUND
    )


def decoded_from_slots(model: object, twin: Twin) -> list[Tensor]:
    """Return the log-probs of each row's response, decoded from slots; rows also move between slots."""
    cache = SlotCache(SLOTS, torch.float32, twin.device)
    cache.reserve(max(len(row) for row in twin.rows))
    long = [n for n, prompt in enumerate(PROMPTS) if prompt > 1]
    sequences = PackedSequences.of([PROMPTS[n] - 1 for n in long], twin.device)
    keeping = PrefillSequences(sequences)
    ids = torch.cat([twin.rows[n][: PROMPTS[n] - 1] for n in long])
    run_body(model, ids[None], sequences.position_ids(), keeping)
    prefixes = dict(zip(long, keeping.prefixes(len(long)), strict=True))
    for number in range(len(twin.rows)):
        cache.fill(torch.tensor([number + 1], device=twin.device), prefixes.get(number))
    for number in reversed(range(len(twin.rows))):
        cache.move(number + 1, number + 4, PROMPTS[number])

    def hidden(current: Tensor, position: Tensor) -> Tensor:
        context = SlotStep(cache, position, int(position.max()) + 1)
        return run_body(model, current[:, None], position[:, None], context)[:, 0]

    return _stepped(model, twin, hidden, 4)


def decoded_by_cohorts(model: object, twin: Twin) -> list[Tensor]:
    """Return the log-probs of each row's response, decoded with the model's own cache."""
    cohorts = Cohorts(model)
    cohorts.begin({number: row[:prompt] for number, (row, prompt) in enumerate(zip(twin.rows, PROMPTS, strict=True))})

    def hidden(current: Tensor, position: Tensor) -> Tensor:
        cohorts.end(n for n, row in enumerate(twin.rows) if int(position[n]) >= len(row) - 1)
        return cohorts.hidden(current, position)

    return _stepped(model, twin, hidden, 0)


def _stepped(model: object, twin: Twin, hidden: object, first: int) -> list[Tensor]:
    """Feed each row's own tokens, one per step; row n is in slot n + `first`. Return the log-probs of responses."""
    found: list[list[Tensor]] = [[] for _ in twin.rows]
    for step in range(max(len(row) - prompt for row, prompt in zip(twin.rows, PROMPTS, strict=True))):
        current, position = (torch.zeros(SLOTS, dtype=torch.int64, device=twin.device) for _ in range(2))
        places = [min(prompt - 1 + step, len(row) - 1) for row, prompt in zip(twin.rows, PROMPTS, strict=True)]
        for number, (row, place) in enumerate(zip(twin.rows, places, strict=True)):
            current[number + first], position[number + first] = row[place], place
        logits = logits_of(model, hidden(current, position)).float().log_softmax(-1)  # type: ignore[operator]
        for number, (row, place) in enumerate(zip(twin.rows, places, strict=True)):
            if place + 1 < len(row):
                found[number].append(logits[number + first, row[place + 1]])
    return [torch.stack(values) if values else torch.zeros(0, device=twin.device) for values in found]
