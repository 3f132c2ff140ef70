"""A user-defined rollout engine: a transformers model that recomputes a row for each of its tokens.

Written to be read, not for speed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from braidrl.algorithms.random import uniform
from braidrl.data.chat import end_ids_of
from braidrl.data.rows import Uid
from braidrl.engines.engine import EngineSpec
from braidrl.engines.requests import EngineRow, Response
from braidrl.engines.sampling import batch_sampling, sample
from braidrl.engines.stepping import SteppingEngine
from braidrl.training.pretrained import load_tokenizer
from braidrl.weights.in_place import EngineWeights
from braidrl.weights.publisher import WeightSource


class PlainEngine(SteppingEngine):
    """An engine chosen by `rollout.engine: examples/plugins/engine.py:PlainEngine`."""

    def __init__(self, spec: EngineSpec) -> None:
        tokenizer, folder = load_tokenizer(spec.model), Path(spec.model)
        super().__init__(tokenizer, end_ids_of(folder, tokenizer), spec.max_sequence_tokens, spec.seed)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, spec.dtype))
        self.weights = EngineWeights(model.to(spec.device).requires_grad_(False).eval())
        self.slots, self.rows = spec.slots, dict[Uid, EngineRow]()

    @property
    def in_flight(self) -> int:
        return len(self.rows)

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        self.weights.refresh(source)
        self.version = version

    def _accept(self, row: EngineRow) -> None:
        self.rows[row.request.uid] = row

    def step(self) -> list[Response]:
        ended = [uid for uid, row in self.rows.items() if self.draw(row)]
        return self._done([self.rows.pop(uid).finished() for uid in ended])

    @torch.no_grad()
    def draw(self, row: EngineRow) -> bool:
        """Draw a row's next token by the row's own random numbers. Return True if it is the last."""
        model, request = self.weights.model, row.request
        ids = torch.cat([request.prompt, torch.tensor(row.tokens, dtype=torch.int64)]).to(model.device)
        logits = model(ids[None]).logits[0, -1:].cpu()
        position = torch.tensor([request.first_draw + len(row.tokens)])
        choice = batch_sampling([request.sampling], "cpu")
        token, log_prob = sample(logits, choice, uniform(request.key(self.seed), position))
        row.log_probs.append(float(log_prob))
        self.tokens_generated += 1
        return row.record_token(int(token))

    def abort(self, uid: Uid) -> Response:
        return self._done([self.rows.pop(uid).finished(aborted=True)])[0]

    def clear(self, release: bool = True) -> None:
        self.rows.clear()
        self._under_way.clear()
