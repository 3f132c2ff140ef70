"""Exact speculation over repeated epochs: runs without and with `rollout.speculation`, the same prompts in each step.

    python -m benchmarks.epochs arithmetic
    python -m benchmarks.epochs sums --prompts 16 --steps 2 --slots 16

model, prompts ──braid train, speculation=off──▶ metrics ┬─▶ equal in all but what a clock measures
               ──braid train, speculation=auto─▶ metrics ┴─▶ seconds of generation, passes and guesses of each epoch

The arithmetic task's model is made first, in about a minute: it imitates a teacher with mistakes. SmolLM2 is fetched.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.machine import describe
from braidrl.config import load_config
from braidrl.engines.embedded.native_decoder import native_decoder
from braidrl.observe.metrics import MEASURED, read_metrics
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import rollout_path
from braidrl.runtimes.restarts import train
from braidrl.runtimes.saving.checkpoints import export_model
from braidrl.training.compute.slots import SlotCache
from examples.arithmetic.task import demonstrations, problems, questions, write_jsonl, write_model
from examples.smollm2.fetch import FOLDER as SMOLLM2
from examples.smollm2.fetch import fetch
from examples.smollm2.tasks import sums

WORK = Path("build/epochs")
RESULT = Path("benchmarks/results/epochs.json")
STAGE = "actor.generate"
WAYS = ("off", "auto")
WIDTHS = (12, 14, 15, 16, 16, 16, 16)
PASSES, LENGTH = (1, 2, 4, 8, 16), 64
"""Tokens of a row in the passes that are timed, and those that it has before."""


def arithmetic(prompts: int) -> list[str]:
    """Return overrides for sums of two numbers by a tiny model, which imitates a teacher with mistakes."""
    folder, pairs = WORK / "arithmetic", problems(4000, 2, seed=0)
    write_jsonl(folder / "train.jsonl", questions(pairs[:prompts]))
    if not (folder / "model").is_dir():
        write_jsonl(folder / "demonstrations.jsonl", demonstrations(pairs, mistakes=0.55, seed=0))
        write_model(folder / "untrained", 0)
        data = [f"model={folder}/untrained", f"data.train={folder}/demonstrations.jsonl", f"output={folder}"]
        run = train(load_config(Path("examples/arithmetic/warm_start.yaml"), data))
        export_model(run, folder / "model")
    return [
        f"model={folder}/model",
        f"data.train={folder}/train.jsonl",
        "flow=grpo",
        "rollout.max_response_tokens=40",
        "trainer.learning_rate=5e-4",
    ]


def smollm2(prompts: int) -> list[str]:
    """Return overrides for sums in words by SmolLM2-135M-Instruct."""
    if not (SMOLLM2 / "config.json").exists():
        fetch()
    write_jsonl(WORK / "sums.jsonl", sums()[0][:prompts])
    return [
        f"model={SMOLLM2}",
        f"data.train={WORK}/sums.jsonl",
        "flow=grpo",
        "rollout.max_response_tokens=16",
        "trainer.learning_rate=1e-5",
        "trainer.share_prompts=true",
    ]


TASKS = {"arithmetic": arithmetic, "sums": smollm2}


def run(task: list[str], name: str, prompts: int, steps: int, speculation: str) -> list[dict[str, Any]]:
    """Train over the same prompts in each step, and return the metrics of the steps; an earlier run is replaced."""
    shutil.rmtree(WORK / f"{name}-{speculation}", ignore_errors=True)
    overrides = [
        *task,
        f"name={name}-{speculation}",
        f"output={WORK}",
        f"rollout.speculation={speculation}",
        f"trainer.steps={steps}",
        f"trainer.prompts_per_step={prompts}",
        "trainer.checkpoint_every=0",
        "rollout.samples_per_prompt=8",
        "evaluation.every=0",
        "reward.verify={name: gsm8k, params: {flexible: true}}",
        "reward.processes=0",  # checks in this process, so that no other one takes a core from generation
        "trackers=[]",
    ]
    return [line for line in read_metrics(train(load_config(None, overrides))) if line["step"] > 0]


def repeated(folder: Path, steps: int) -> list[float]:
    """Return for each step the share of its drawn tokens that an earlier step has drawn behind the same tokens."""
    earlier, shares = set[tuple[int, ...]](), list[float]()
    for step in range(1, steps + 1):
        rows = read_rollouts(rollout_path(folder, step))
        prefixes = []
        for number in range(len(rows)):
            ids, actions = tuple(rows["tokens"][number].tolist()), rows["action_mask"][number].nonzero().flatten()
            prefixes += [ids[: place + 1] for place in actions.tolist()]
        shares.append(sum(prefix in earlier for prefix in prefixes) / len(prefixes))
        earlier.update(prefixes)
    return shares


def epoch(number: int, plain: dict[str, Any], guessed: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one epoch. Raises AssertionError if a metric differs that no clock measures."""
    names = [name for name in plain | guessed if not name.startswith(MEASURED)]
    differing = [name for name in names if plain.get(name) != guessed.get(name)]
    assert not differing, f"epoch {number} differs in {', '.join(differing)}"
    seconds = [line[f"time/{STAGE}"] for line in (plain, guessed)]
    shares = {name: guessed.get(f"speculation/{STAGE}/{name}") for name in ("passes", "drafted", "accepted")}
    times = {"seconds_off": seconds[0], "seconds_auto": seconds[1], "ratio": seconds[0] / seconds[1]}
    return {"epoch": number, **times, **shares}


@torch.no_grad()
def ceiling(overrides: list[str], rows: int) -> tuple[int, float]:
    """Return the tokens a row of the pass that computes most tokens per second, and its rate by that of one token a
    row: generation would be so many times as fast if guesses were free and all of them right.
    """
    config = load_config(None, overrides)
    dtype = getattr(torch, str(config.rollout.dtype))
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype).eval()
    decoder, cache = native_decoder(model), SlotCache(rows, dtype, model.device)
    assert decoder is not None, "guesses need compiled kernels"
    decoder.refresh()
    cache.reserve(LENGTH + PASSES[-1])
    seconds: dict[int, list[float]] = {count: [] for count in PASSES}
    for count in PASSES * 7:
        slots, positions = torch.arange(rows).repeat_interleave(count), torch.arange(count).repeat(rows) + LENGTH
        start = time.perf_counter()
        decoder.logits(torch.ones_like(slots), slots, positions, cache)
        seconds[count].append(time.perf_counter() - start)
    rates = {count: count / statistics.median(of_count) for count, of_count in seconds.items()}
    best = max(rates, key=lambda count: rates[count])
    return best, rates[best] / rates[1]


def medians(of_turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of one epoch's figures over the turns, and the ratio of each turn."""
    middle = {name: statistics.median(turn[name] or 0.0 for turn in of_turns) for name in of_turns[0]}
    return {**middle, "ratios": [turn["ratio"] for turn in of_turns]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10, help="steps, each an epoch over all prompts")
    parser.add_argument("--slots", type=int, default=128, help="rows that are decoded at once")
    parser.add_argument("--turns", type=int, default=1, help="runs of each side, in turn; figures are medians")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the engine's weights")
    arguments = parser.parse_args()
    for name in arguments.tasks:
        task = [*TASKS[name](arguments.prompts), f"rollout.dtype={arguments.dtype}", f"rollout.slots={arguments.slots}"]
        turns: list[list[dict[str, Any]]] = []
        for turn in range(arguments.turns):
            both = (run(task, f"{name}-{turn}", arguments.prompts, arguments.steps, way) for way in WAYS)
            turns.append([epoch(i + 1, *pair) for i, pair in enumerate(zip(*both, strict=True))])
        epochs = [medians(of_turns) for of_turns in zip(*turns, strict=True)]
        for one, share in zip(epochs, repeated(WORK / f"{name}-0-auto", arguments.steps), strict=True):
            one["repeated"] = share
        count, most = ceiling(task, min(arguments.slots, 8 * arguments.prompts))
        rows = f"{arguments.prompts} prompts x 8 samples in {arguments.slots} slots"
        print(f"\n{name}, {arguments.dtype}: {rows}; all other metrics are equal")
        print(f"if guesses were free and all right: {most:.2f} times as fast, with {count} tokens a row in a pass")
        heads = "passes a token  guesses a token  of them right  tokens repeated"
        print(f"epoch  seconds off  seconds auto  times as fast  {heads}")
        for one in epochs:
            names = ("seconds_off", "seconds_auto", "ratio", "passes", "drafted", "accepted", "repeated")
            print(
                f"{one['epoch']:>5} "
                + "".join(f"{one[name]:>{width}.2f}" for name, width in zip(names, WIDTHS, strict=True))
            )
        known = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
        known[f"{name} {arguments.dtype} {arguments.slots} slots"] = {
            **vars(arguments),
            **describe(torch.get_num_threads()),
            "ceiling": most,
            "epochs": epochs,
        }
        RESULT.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
