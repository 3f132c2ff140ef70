"""TRL's GRPOTrainer on a task of examples/smollm2, with the settings of a configuration there; writes metrics as
Braid's runs do.

    build/bench-venv/bin/python -m benchmarks.sides.learn_trl SETTINGS.json

SETTINGS.json is what `benchmarks.learning` writes: model, data, sizes, learning rate, seed, the file of metrics.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.turns import peak_mebibytes
from braidrl.rewards.verifiers import gsm8k


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for each completion whose last number is the answer, by the rule of the run's verifier."""
    texts = (messages[0]["content"] for messages in completions)
    return [float(gsm8k(text, wanted, flexible=True)) for text, wanted in zip(texts, answer, strict=True)]


class Recorder(TrainerCallback):
    """Writes a line per step, and evaluates the held-out questions at intervals; step times exclude evaluation."""

    def __init__(self, task: dict[str, Any], tokenizer: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.held_out = [json.loads(line) for line in Path(task["held_out"]).read_text().splitlines()]
        self.seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.write({"step": 0, "eval/held_out/avg@4": self.evaluate(model)})

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds = time.monotonic() - self.started

    def on_log(self, args: Any, state: Any, control: Any, model: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" not in logs:
            return
        line = {
            "step": state.global_step,
            "reward/mean": logs["reward"],
            "time/step": self.seconds,
            "peak_mebibytes": peak_mebibytes(),
        }
        line["response/length_mean"] = logs["completions/mean_length"]
        if state.global_step % self.task["evaluate_every"] == 0:
            line["eval/held_out/avg@4"] = self.evaluate(model)
        self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        with Path(self.task["metrics"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)

    @torch.no_grad()
    def evaluate(self, model: Any) -> float:
        """Return the share of right answers over four samples for each held-out question, at temperature 1."""
        asked = [[{"role": "user", "content": example["prompt"]}] for example in self.held_out]
        encoded = self.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, padding=True, padding_side="left", return_tensors="pt", return_dict=True
        )
        drawn = model.generate(
            **encoded,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=4,
            max_new_tokens=self.task["response_tokens"],
        )
        texts = self.tokenizer.batch_decode(drawn[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
        answers = [example["answer"] for example in self.held_out for _ in range(4)]
        return sum(gsm8k(text, wanted, flexible=True) for text, wanted in zip(texts, answers, strict=True)) / len(texts)


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    examples = [json.loads(line) for line in Path(task["train"]).read_text().splitlines()]
    settings = GRPOConfig(
        output_dir=mkdtemp(prefix="trl-learns-"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=task["batch_rows"],
        gradient_accumulation_steps=task["rows"] // task["batch_rows"],
        num_generations=task["group"],
        max_completion_length=task["response_tokens"],
        temperature=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        num_iterations=1,
        learning_rate=task["learning_rate"],
        warmup_steps=task["warmup_steps"],
        lr_scheduler_type="constant_with_warmup",
        adam_beta1=task["betas"][0],
        adam_beta2=task["betas"][1],
        weight_decay=task["weight_decay"],
        max_grad_norm=task["max_grad_norm"],
        gradient_checkpointing=False,
        max_steps=task["steps"],
        seed=task["seed"],
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": e["prompt"]}], "answer": e["answer"]} for e in examples]
    )
    GRPOTrainer(
        model=task["model"],
        args=settings,
        reward_funcs=right,
        processing_class=tokenizer,
        train_dataset=data,
        callbacks=[Recorder(task, tokenizer)],
    ).train()


if __name__ == "__main__":
    main()
