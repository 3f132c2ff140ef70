"""The training half of a TRL GRPO step on rows of random tokens: its own log-probs, loss, backward and optimizer;
nothing generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from tempfile import mkdtemp
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.turns import Turn, peak_mebibytes

PROMPT = 16


def prepare(case: Mapping[str, Any]) -> Turn:
    torch.set_num_threads(case["threads"])
    rows, tokens, vocabulary = case["rows"], case["tokens"], case["vocabulary"]
    settings = GRPOConfig(
        output_dir=mkdtemp(prefix="trl-bench-"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": case["dtype"]},
        per_device_train_batch_size=rows,
        num_generations=8,
        max_completion_length=tokens - PROMPT,
        beta=0.0,
        gradient_checkpointing=False,
        max_steps=1,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=case["model"],
        args=settings,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        processing_class=AutoTokenizer.from_pretrained(case["model"]),
        train_dataset=Dataset.from_list([{"prompt": "w1"}] * rows),
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocabulary, (rows, tokens), generator=generator)
    inputs = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones(rows, PROMPT, dtype=torch.int64),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": torch.ones(rows, tokens - PROMPT, dtype=torch.int64),
        "advantages": torch.randn(rows, generator=generator),
        "num_items_in_batch": torch.tensor(float(rows * (tokens - PROMPT))),
    }
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1

    def turn() -> dict[str, float]:
        before = peak_mebibytes()
        trainer.compute_loss(trainer.model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"tokens": rows * tokens, "peak_mebibytes": peak_mebibytes(), "mebibytes_before": before}

    return turn
