"""Braid's embedded engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.turns import Turn
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import Request, SamplingParams
from braidrl.training.loading import load_decoder
from braidrl.training.pretrained import load_tokenizer


def prepare(case: Mapping[str, Any]) -> Turn:
    torch.set_num_threads(case["threads"])
    model = load_decoder(case["model"], getattr(torch, case["dtype"]))
    lengths, group = case["lengths"], case["group"]
    longest = len(case["prompts"][0]) + max(lengths)
    engine = EmbeddedEngine(
        model, load_tokenizer(case["model"]), Decoding(len(lengths), longest, **case.get("engine", {}))
    )
    requests = [
        Request(
            (0, i // group, i % group),
            torch.tensor(case["prompts"][i // group]),
            SamplingParams(max_tokens=n, ends=False),
        )
        for i, n in enumerate(lengths)
    ]
    short = [
        replace(r, sampling=replace(r.sampling, max_tokens=min(n, 40))) for r, n in zip(requests, lengths, strict=True)
    ]
    engine.generate(requests if case.get("engine") else short)

    def turn() -> dict[str, float]:
        finished = engine.generate(requests)
        return {"tokens": sum(len(row.tokens) for row in finished)}

    return turn
