"""transformers' generate; a finished row keeps its place until the longest row ends, as in any batch without slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.turns import Turn


def prepare(case: Mapping[str, Any]) -> Turn:
    torch.set_num_threads(case["threads"])
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=getattr(torch, case["dtype"])).eval()
    ids = torch.tensor(case["prompts"]).repeat_interleave(case["group"], 0)
    longest, tokens = max(case["lengths"]), sum(case["lengths"])

    @torch.no_grad()
    def generate(count: int) -> None:
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=count,
            min_new_tokens=count,
        )
        assert made.shape[1] == ids.shape[1] + count

    def turn() -> dict[str, float]:
        generate(longest)
        return {"tokens": tokens}

    generate(8)
    return turn
