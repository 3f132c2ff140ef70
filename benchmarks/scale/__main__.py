"""Plays ranks of large runs, each in a process of its own, and prints the table of docs/scaling.md."""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.scale.played import join_played
from braidrl.config import Config, load_config
from braidrl.data.prompts import PARTS, Reading, new_folder, part_of, write_part
from braidrl.data.templates import PromptTemplate
from braidrl.runtimes.run import TrainingRun
from braidrl.training.loading import load_tokenizer

SIZES = (8, 64, 512, 1024)
GROUPS, SAMPLES, LINES = 2, 4, 64
"""Groups of a rank's rows, their samples, and lines of data for each rank."""
STEPS = 3


class Alone:
    """A rank that writes its part of a source without others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def config_of(folder: Path, size: int) -> Config:
    return load_config(
        folder / "run.yaml",
        [
            "flow=grpo",
            "runtime=distributed",
            f"workers={size}",
            "threads=1",
            "device=cpu",
            f"model={folder / 'model'}",
            f"data.train={folder / f'lines-{size}.jsonl'}",
            "data.in_memory=1",
            f"data.cache={folder / 'cache'}",
            "reward.verify=gsm8k",
            "reward.sandbox=none",
            "evaluation.every=0",
            "trainer.checkpoint_every=0",
            f"rollout.samples_per_prompt={SAMPLES}",
            # Rows of equal length: no rank's rows move, whichever rank is played.
            "rollout.max_response_tokens=1",
            f"trainer.prompts_per_step={GROUPS * size}",
            f"trainer.steps={STEPS}",
            "trainer.max_tokens_per_device=256",
            f"output={folder / 'runs'}",
        ],
    )


def write_data(folder: Path, size: int) -> float:
    """Write the parts of all ranks of a source; return the seconds of one of them."""
    config, seconds = config_of(folder, size), list[float]()
    source = config.data.training_sources[0]
    lines = [json.dumps({"prompt": f"{n % 90 + 10}+7=", "answer": str(n % 90 + 17)}) for n in range(LINES * size)]
    source.path.write_text("\n".join(lines) + "\n")
    template = PromptTemplate.of(load_tokenizer(config.model), config.data)
    table = new_folder(Reading(source), config.data, template)[0]
    table.mkdir(parents=True, exist_ok=True)
    start = time.process_time()
    outcome = write_part(Reading(source), iter(Reading(source)), template, config.data, Alone(0, size), table)  # type: ignore[arg-type]
    seconds.append(time.process_time() - start)
    # Equal rows: the parts of the other ranks have the lengths of the first one's.
    for rank in range(1, size):
        part_of(table, rank, size).write_bytes(part_of(table, 0, size).read_bytes())
    facts = {**outcome["facts"], "read": LINES * size}
    (table / "facts.json").write_text(json.dumps(facts))
    (table / PARTS).write_text(json.dumps({"parts": size, "batches": size}))
    return seconds[0]


def play(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """Play one rank through its start, some steps and a checkpoint."""
    record = folder / f"record-{size}.pt"
    world = join_played(rank, size, GROUPS, None if rank == 0 else torch.load(record))
    config = config_of(folder, size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    run = TrainingRun(config, world=world)
    started = time.process_time() - start - world.played.modelled_s
    world.folder = run.folder
    world.mark()
    marked = (world.played.sent.total(), world.played.messages.total())
    with run:
        run.train()
    world.mark()
    if rank == 0:
        torch.save(world.played.record, record)
    step = sum(s for place, s in world.seconds.items() if place.startswith((f"step {STEPS}", "admission")))
    return {
        "size": size,
        "rank": rank,
        "start_s": started,
        "step_s": step,
        "seconds": dict(world.seconds),
        "bytes_a_step": (world.played.sent.total() - marked[0]) / STEPS,
        "messages_a_step": (world.played.messages.total() - marked[1]) / STEPS,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "before_mib": before / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--play", type=int, nargs=2, metavar=("RANK", "SIZE"))
    arguments = parser.parse_args()
    if arguments.play:
        print(json.dumps(play(arguments.folder, *arguments.play)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        (folder / "run.yaml").write_text("{}")
        print(
            "| ranks | rank | tokenising its share, s | start, s | a step, s | MiB sent a step | messages | peak MiB |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for size in arguments.sizes:
            tokenised = write_data(folder, size)
            for rank in (0, 1, size - 1):
                command = [sys.executable, "-m", "benchmarks.scale", "--folder", name, "--play", str(rank), str(size)]
                ended = subprocess.run(command, capture_output=True, text=True, check=False)
                if ended.returncode:
                    print(ended.stderr[-4000:], file=sys.stderr)
                    raise SystemExit(1)
                told = json.loads(ended.stdout.splitlines()[-1])
                numbers = [told[key] for key in ("start_s", "step_s")]
                print(
                    f"| {size:,} | {rank:,} | {tokenised:.2f} | {numbers[0]:.2f} | {numbers[1]:.2f} | "
                    f"{told['bytes_a_step'] / 2**20:.2f} | {told['messages_a_step']:,.0f} | {told['peak_mib']:,.0f} |",
                    flush=True,
                )
                print(json.dumps(told), file=sys.stderr)


def write_model(folder: Path) -> None:
    """Write a tiny model, the same as the tests use."""
    from tests.tiny import write_model as tiny_model

    tiny_model(folder, "qwen2")


if __name__ == "__main__":
    main()
