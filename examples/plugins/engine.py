"""A user-defined rollout engine: a transformers model that recomputes a row for each of its tokens. Written to be read, not for speed."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from braidrl.algorithms.random import uniform
from braidrl.data.chat import end_ids_of
from braidrl.data.rows import Uid
from braidrl.engines.engine import EngineSpec
from braidrl.engines.requests import Response
from braidrl.engines.row_request import EngineRow, RemoteRow
from braidrl.engines.sampling import batch_sampling, sample
from braidrl.engines.stepping import SteppingEngine
from braidrl.training.loading import load_tokenizer
from braidrl.weights.in_place import EngineWeights
from braidrl.weights.publisher import WeightSource


class PlainEngine(SteppingEngine):
    """An engine chosen by `rollout.engine: examples/plugins/engine.py:PlainEngine`."""

    def __init__(self, spec: EngineSpec) -> None:
        tokenizer, folder = load_tokenizer(spec.model), Path(spec.model)
        super().__init__(tokenizer, end_ids_of(folder, tokenizer), spec.max_sequence_tokens, spec.seed)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, spec.dtype))
        self.weights = EngineWeights(model.to(spec.device).requires_grad_(False).eval(), dtype=None)
        self.slots, self.flights = spec.slots, dict[Uid, RemoteRow]()

    @property
    def in_flight(self) -> int:
        return len(self.flights)

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        self.weights.refresh(source)
        self.version = version
        for flight in self.flights.values():
            flight.row.versions.append((len(flight.tokens), version))

    def _accept(self, row: EngineRow) -> None:
        row.versions = [(0, self.version)]
        self.flights[row.request.uid] = RemoteRow(row)

    def step(self) -> list[Response]:
        rows = list(self.flights.items())
        return self._done([self.flights.pop(uid).finished() for uid, flight in rows if self.draw(flight)])

    @torch.no_grad()
    def draw(self, flight: RemoteRow) -> bool:
        """Draw a row's next token by the row's own random numbers. Return True if it is the last."""
        row, model, sampling = flight.row, self.weights.model, flight.row.request.sampling
        ids = torch.cat([row.request.prompt, torch.tensor(flight.tokens, dtype=torch.int64)]).to(model.device)
        logits = model(ids[None]).logits[0, -1:].cpu()
        position = torch.tensor([row.request.first_draw + len(flight.tokens)])
        settings = (
            torch.tensor([float(sampling.log_prob_temperature)]),
            torch.tensor([sampling.takes_likeliest]),
            torch.tensor([sampling.top_k]),
            torch.tensor([sampling.top_p], dtype=torch.float64),
        )
        choice = batch_sampling([sampling], *settings)
        token, log_prob = sample(logits, choice, uniform(row.request.key(self.seed), position))
        flight.tokens.append(int(token))
        flight.log_probs.append(float(log_prob))
        self.tokens_generated += 1
        stops = row.record_token(int(token)) or int(token) in row.stop_token_ids
        return stops or len(flight.tokens) == row.limit

    def abort(self, uid: Uid) -> Response:
        return self._done([self.flights.pop(uid).finished(aborted=True)])[0]

    def clear(self, release: bool = True) -> None:
        self.flights.clear()
        self._under_way.clear()
