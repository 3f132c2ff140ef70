"""TRL's GRPOTrainer on the CPU, generating with transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LogitsProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.shapes import END
from benchmarks.turns import Channel, peak_mebibytes


class Lengths(LogitsProcessor):
    """Lets each row end exactly at its length."""

    def __init__(self, lengths: list[int], prompt: int) -> None:
        self.lengths, self.prompt = torch.tensor(lengths), prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = self.lengths <= input_ids.shape[1] - self.prompt + 1
        ends = scores[:, END].clone()
        scores[:, END] = -torch.inf
        scores[last] = -torch.inf
        scores[last, END] = ends[last]
        return scores


class Turns(TrainerCallback):
    """Ends a turn with each optimizer step and waits for the next; the first step warms up."""

    def __init__(self, channel: Channel, tokens: int) -> None:
        self.channel, self.tokens, self.steps = channel, tokens, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self.steps:
            self.channel.report({"tokens": self.tokens, "peak_mebibytes": peak_mebibytes()})
        else:
            self.channel.send({"ready": True})
        self.steps += 1
        if not self.channel.wait_for_turn():
            control.should_training_stop = True
        return control


def run(case: Mapping[str, Any], channel: Channel) -> None:
    torch.set_num_threads(case["threads"])
    lengths, group, bf16 = case["lengths"], case["group"], case["dtype"] == "bfloat16"
    texts = [json.loads(line)["prompt"] for line in Path(case["data"]).read_text().splitlines()]
    settings = GRPOConfig(
        output_dir=mkdtemp(prefix="trl-bench-"),
        use_cpu=True,
        bf16=bf16,
        model_init_kwargs={"dtype": case["dtype"]},
        per_device_train_batch_size=case.get("batch_rows", len(lengths)),
        gradient_accumulation_steps=len(lengths) // case.get("batch_rows", len(lengths)),
        num_generations=group,
        max_completion_length=max(lengths),
        beta=0.0,
        temperature=1.0,
        top_k=0,
        learning_rate=1e-6,
        gradient_checkpointing=False,
        max_steps=100_000,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=case["model"],
        args=settings,
        reward_funcs=score,
        processing_class=AutoTokenizer.from_pretrained(case["model"]),
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        callbacks=[Turns(channel, case["prompt_tokens"] * len(lengths) + sum(lengths))],
    )
    force_lengths(trainer.model, Lengths(lengths, case["prompt_tokens"]))
    trainer.train()
    sys.exit(0)


def force_lengths(model: Any, processor: Lengths) -> None:
    generate = model.generate

    def generate_with_lengths(*args: Any, **kwargs: Any) -> Any:
        made = generate(*args, **kwargs, logits_processor=[processor])
        assert made.shape[1] == processor.prompt + int(processor.lengths.max())
        return made

    model.generate = generate_with_lengths


def score(completions: list[str], **_: Any) -> list[float]:
    """Return the share of a response that is one given word; it differs within groups."""
    return [float(completion.count("w1")) for completion in completions]
