"""Runs single ranks of large simulated runs, each in a separate process, and prints the table of docs/scaling.md."""

import argparse
import datetime
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.scale import hybrid, streaming
from benchmarks.scale.played import (
    GROUPS,
    OF_A_MACHINE,
    SAMPLES,
    AnyGap,
    PlayedExchange,
    PlayedWorld,
    heartbeats,
    join_played,
)
from benchmarks.scale.runs import settings, write_sums
from braidrl.config import Config
from braidrl.data.lines import Lines, index_lines
from braidrl.data.prompts import LINES as INDEX
from braidrl.data.prompts import PARTS, new_folder
from braidrl.data.sources import Reading
from braidrl.data.tables import own_batches_of, part_of, part_writers, write_part
from braidrl.data.templates import PromptTemplate
from braidrl.runtimes.evaluation import RunScores
from braidrl.runtimes.interfaces import Backend
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.run_records import RunRecords
from braidrl.runtimes.saving.checkpoints import RunState
from braidrl.runtimes.step_metrics import StepMetrics
from braidrl.training.pretrained import load_tokenizer

SIZES = (8, 64, 512, 1024, 4096)
LINES = 64
"""Lines of data for each rank."""
STEPS, WARM = 8, 2
"""Steps of a run, and how many of them only warm caches; the median of the others counts, and of the evaluations."""
RESPONSE_TOKENS = 16
"""Maximum length of unequal rows."""
OTHERS = {"streaming": streaming.play, "hybrid": hybrid.play}
PARTS_OF_RUN = ("start", "step", "evaluation", "checkpoint", "resume", "report")
RESULT = Path(__file__).parents[1] / "results" / "ranks.json"


class SingleProcess:
    """A rank that writes its part of a source without the other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class PlayedScores(RunScores):
    """Evaluations that are counted separately."""

    world: PlayedWorld

    def measure(self, backend: Backend[Any], step: int) -> StepMetrics:
        with self.world.within(f"evaluation after {step}"):
            return super().measure(backend, step)


class PlayedRecords(RunRecords):
    """Records whose report is counted separately."""

    world: PlayedWorld

    def report(self, rehearsal: bool = False) -> None:
        with self.world.within("report"):
            super().report(rehearsal)


class PlayedRun(TrainingRun):
    """A training run whose parts are counted separately."""

    world: PlayedWorld

    def _start_controller(self) -> None:
        super()._start_controller()
        self.gaps = AnyGap(0.0)
        self.scores = PlayedScores(self.prepared, self.folder, self.checkpoints, self.world)
        if not isinstance(self.records, PlayedRecords):
            self.records = PlayedRecords(self.folder, self.config, self.progress)
            self.records.world = self.world
        self.backend.exchange = PlayedExchange(self.world, self.interrupts, self.backend.trace)

    def _one_step(self, state: RunState) -> None:
        with self.world.within(f"step {self.step + 1}"):
            super()._one_step(state)

    def _save(self, state: RunState, wait: bool = False) -> None:
        with self.world.within("checkpoint"):
            super()._save(state, wait=True)


def config_of(folder: Path, size: int, steps: int = STEPS, unequal: bool = False) -> Config:
    return settings(
        folder,
        size,
        steps,
        "runtime=distributed",
        f"workers={size}",
        f"data.train={folder / f'lines-{size}.jsonl'}",
        f"data.eval.held_out={folder / f'held-out-{size}.jsonl'}",
        "data.in_memory=1",
        f"data.cache={folder / 'cache'}",
        "evaluation.every=2",
        "evaluation.before_first_step=true",
        f"evaluation.samples={SAMPLES}",
        f"evaluation.max_prompts={GROUPS * size}",
        # Rows of equal length do not move.
        f"rollout.max_response_tokens={RESPONSE_TOKENS if unequal else 1}",
    )


def write_data(folder: Path, size: int) -> float:
    """Write the parts of all ranks of the training and the held-out data; return the seconds of one rank's share."""
    config = config_of(folder, size)
    template = PromptTemplate.of(load_tokenizer(config.model), config.data)
    held_out, seconds = config.data.evaluation_sources["held_out"], 0.0
    for source, count, split in ((config.data.training_sources[0], LINES, "train"), (held_out, GROUPS, "test")):
        write_sums(source.path, count * size)
        reading = Reading(source, usual_split=split)
        table = new_folder(reading, config.data, template)[0]
        table.mkdir(parents=True, exist_ok=True)
        start = time.process_time()
        alone: Any = SingleProcess(0, size)
        index_lines(source.path, table / INDEX)
        share = own_batches_of(reading, alone, None, Lines(source.path, table / INDEX))
        outcome = write_part(share, template, config.data, table)
        seconds = seconds or time.process_time() - start
        # Equal rows: the parts of the other ranks have the lengths of the first one's.
        parts = len(part_writers(size))
        for number in range(1, parts):
            part_of(table, number, parts).write_bytes(part_of(table, 0, parts).read_bytes())
        (table / "facts.json").write_text(json.dumps({**outcome["facts"], "read": parts * outcome["facts"]["read"]}))
        (table / PARTS).write_text(json.dumps({"parts": parts, "batches": parts * -(-outcome["batches"] // parts)}))
    return seconds


def play(folder: Path, rank: int, size: int, unequal: bool) -> dict[str, Any]:
    """Run one rank through its start, some steps, evaluations, a checkpoint and a resume."""
    record = folder / f"record-{size}-{unequal}.pt"
    said = [] if rank == 0 else torch.load(record, weights_only=False)
    world = PlayedWorld(join_played(rank, size), said, unequal)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with PlayedRun(config_of(folder, size, unequal=unequal), world=world) as run:
        world.folder = run.folder
        with world.within("train"):
            run.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = config_of(folder, size, STEPS + 1, unequal)
    with world.within("resume"), PlayedRun(config, world=world, resume=run.folder):
        pass
    world.mark()
    if rank == 0:
        torch.save(world.played.record, record)
    parts = dict(world.parts)
    parts["step"] = median([parts[f"step {step}"] for step in range(WARM + 1, STEPS + 1)])
    parts["evaluation"] = median([counts for name, counts in parts.items() if name.startswith("evaluation after")])
    return {
        "ranks": size,
        "rank": rank,
        "unequal": unequal,
        "parts": {name: dict(parts.get(name, {})) for name in PARTS_OF_RUN},
        "peak_mib": peak / 1024,
        "grown_mib": (peak - before) / 1024,
        "places": {place: round(s, 4) for place, s in world.places.items() if s > 0.002},
    }


def median(counted: Sequence[Counter[str]]) -> Counter[str]:
    """Return the median of each count."""
    return Counter({name: statistics.median(each[name] for each in counted) for name in counted[0]})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--runtime", choices=["distributed", *OTHERS], default="distributed")
    parser.add_argument("--unequal", action="store_true", help="rows of 1 to 16 sampled tokens, which move")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--play", type=int, nargs=2, metavar=("RANK", "SIZE"))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/ranks.json")
    arguments = parser.parse_args()
    if arguments.play:
        rank, size = arguments.play
        other = OTHERS.get(arguments.runtime)
        played = other(arguments.folder, size) if other else play(arguments.folder, rank, size, arguments.unequal)
        print(json.dumps(played))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        (folder / "run.yaml").write_text("{}")
        if arguments.runtime in OTHERS:
            kept: dict[str, Any] = {arguments.runtime: play_other(folder, arguments)}
        else:
            kept = {"played_unequal" if arguments.unequal else "played": play_ranks(folder, arguments)}
            kept |= {"store_requests_a_second": heartbeats(), "groups": GROUPS, "samples": SAMPLES}
            print(f"requests to the store a second of {OF_A_MACHINE} ranks: {kept['store_requests_a_second']:.1f}")
    if arguments.save:
        about = {"date": datetime.date.today().isoformat(), **describe(1)}
        RESULT.write_text(json.dumps({**json.loads(RESULT.read_text()), **about, **kept}, indent=1) + "\n")


def in_process(folder: Path, arguments: argparse.Namespace, rank: int, size: int) -> dict[str, Any]:
    """Run in a separate process; return its result. Raises SystemExit if it fails."""
    command = [sys.executable, "-m", "benchmarks.scale", "--folder", str(folder), "--runtime", arguments.runtime]
    command += ["--play", str(rank), str(size), *(["--unequal"] if arguments.unequal else [])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(ended.stderr[-4000:], file=sys.stderr)
        raise SystemExit(1)
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


def play_ranks(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run ranks 0, 1 and the last of `distributed` for each size, and print a table."""
    played = []
    print("| ranks | rank | tokenising, s |" + "".join(f" {part}, s |" for part in PARTS_OF_RUN), end="")
    print(" KiB sent a step | messages | messages of gloo's rings | peak MiB |")
    print("|---" * (len(PARTS_OF_RUN) + 7) + "|")
    for size in arguments.sizes:
        tokenised = write_data(folder, size)
        for rank in (0, 1, size - 1):
            told = in_process(folder, arguments, rank, size) | {"tokenising_s": tokenised}
            played.append(told)
            parts = told["parts"]
            seconds = "".join(f" {parts[part].get('seconds', 0.0):.3f} |" for part in PARTS_OF_RUN)
            sent = f"{parts['step']['bytes'] / 2**10:,.0f} | {parts['step']['messages']:,.0f}"
            sent += f" | {parts['step']['messages_in_rings']:,.0f}"
            print(f"| {size:,} | {rank:,} | {tokenised:.2f} |{seconds} {sent} | {told['peak_mib']:,.0f} |", flush=True)
    return played


def play_other(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Simulate `streaming` or `hybrid` for each size, and print a table of a step of its processes."""
    played = []
    print("| devices | rows | process | a step, s | answering, s | KiB | messages | leases |\n" + "|---" * 8 + "|")
    for size in arguments.sizes:
        played.append(in_process(folder, arguments, 0, size))
        for name, step in played[-1]["parts"].items():
            answering = f"{step['answering_s']:.3f}" if "answering_s" in step else ""
            sent = f"{step['bytes'] / 2**10:,.0f} | {step['messages']:,.0f}" if "bytes" in step else " | "
            leases = f"{step['leases']:.0f}" if "leases" in step else ""
            figures = f"{step['seconds']:.3f} | {answering} | {sent} | {leases}"
            print(f"| {size:,} | {played[-1]['rows']:,} | {name} | {figures} |")
        sys.stdout.flush()
    return played


def write_model(folder: Path) -> None:
    """Write a tiny model, the same as the tests use."""
    from tests.tiny import write_model as tiny_model

    tiny_model(folder, "qwen2")


if __name__ == "__main__":
    main()
