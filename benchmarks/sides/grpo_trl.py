"""TRL's GRPOTrainer on the CPU, generating with transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset, Image
from transformers import AutoTokenizer, LogitsProcessor, TrainerCallback
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
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

    def __init__(self, channel: Channel, counts: Mapping[str, int]) -> None:
        self.channel, self.counts, self.steps = channel, counts, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self.steps:
            self.channel.report({**self.counts, "peak_mebibytes": peak_mebibytes()})
        else:
            self.channel.send({"ready": True})
        self.steps += 1
        if not self.channel.wait_for_turn():
            control.should_training_stop = True
        return control


def run(case: Mapping[str, Any], channel: Channel) -> None:
    torch.set_num_threads(case["threads"])
    lengths, group, bf16 = case["lengths"], case["group"], case["dtype"] == "bfloat16"
    counts = {"tokens": case["prompt_tokens"] * len(lengths) + sum(lengths)}
    counts |= {"images": case["images"]} if "images" in case else {}
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
        processing_class=processor_of(case),
        train_dataset=data_of(Path(case["data"])),
        callbacks=[Turns(channel, counts)],
    )
    if not case.get("train_vision", True):
        trainer.model.model.visual.requires_grad_(False)
    force_lengths(trainer.model, Lengths(lengths, case["prompt_tokens"]))
    trainer.train()
    sys.exit(0)


def data_of(path: Path) -> Dataset:
    """Return the prompts of a file; those with images as messages, which TRL needs, and the images beside them."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    if "images" not in records[0]:
        return Dataset.from_list([{"prompt": record["prompt"]} for record in records])
    rows = [
        {
            "prompt": [{"role": "user", "content": record["prompt"].removeprefix("<image>")}],
            "image": str(path.parent / record["images"][0]),
        }
        for record in records
    ]
    return Dataset.from_list(rows).cast_column("image", Image())


def processor_of(case: Mapping[str, Any]) -> Any:
    """Return the tokenizer; with images a processor on Pillow, as Braid's, without the part for videos, which needs
    torchvision.
    """
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    if "images" not in case:
        return tokenizer

    class WithoutVideos(Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            """Accept any argument."""

    return WithoutVideos(
        Qwen2VLImageProcessorPil.from_pretrained(case["model"]),
        tokenizer,
        SimpleNamespace(),
        chat_template=tokenizer.chat_template,
    )


def force_lengths(model: Any, processor: Lengths) -> None:
    generate = model.generate

    def generate_with_lengths(*args: Any, **kwargs: Any) -> Any:
        made = generate(*args, **kwargs, logits_processor=[processor])
        assert made.shape[1] == processor.prompt + int(processor.lengths.max())
        return made

    model.generate = generate_with_lengths


def score(completions: list[Any], **_: Any) -> list[float]:
    """Return how often a response has one given word; it differs within groups."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(text.count("w1") + text.count("red")) for text in texts]
