"""A weight update of a model of 0.55 GB under streaming, from the trainer to an engine in a second process, for two
versions in one run.

    python -m benchmarks.streaming.update [--against COMMIT] [--steps 4] [--turns 2]

    trainer ──write, beside its next rows──▶ file in shared memory ──load──▶ engine, which waits

Every turn is a run of `braid train`: the medians of its steps, of the seconds that the trainer takes to write a version
and those that the engine waits for it, and the peak of shared memory and of the memory of all processes (each page
counted once), over the model's bytes. The first step is left out, because processes warm up in it. One more run of each
policy, whose seconds do not count, adds up the bytes that trainer and engine copy in host memory for a version
(`counted/sitecustomize.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.streaming.rate import ROOT, tree_of

WIDTH, LAYERS = 1024, 10
COUNTING = Path(__file__).parent / "counted"
SECONDS = {"engine_waits_s": "weights/actor/update_seconds", "trainer_writes_s": "weights/actor/write_seconds"}
SETTINGS = """
    flow=grpo runtime=streaming device=cpu dtype=float32 threads=1 data.train=train.jsonl
    reward.verify=exact output=runs model=model
    trainer.prompts_per_step=2 rollout.samples_per_prompt=2 rollout.max_response_tokens=4 trainer.checkpoint_every=0
    evaluation.every=0
"""


def memory_of(run: psutil.Process) -> int:
    """Return the bytes of memory of all processes of a run, each page once."""
    total = 0
    for process in (run, *run.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has ended
            continue
    return total


def used_shared_memory() -> int:
    """Return the bytes of all files in shared memory, also of those without a name."""
    about = os.statvfs("/dev/shm")
    return (about.f_blocks - about.f_bfree) * about.f_frsize


def measured(
    tree: Path, folder: Path, steps: int, size: int, policy: str = "end", counts: Path | None = None
) -> dict[str, float]:
    """Run one version of the package and return its figures.

    With `counts`, a file to which each process adds its copies, return these.
    """
    settings = [*SETTINGS.split(), f"trainer.steps={steps + 1}", f"streaming.weights={policy}"]
    command = [sys.executable, "-m", "braidrl.cli", "train", *settings]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    if counts is not None:
        counts.unlink(missing_ok=True)
        environment |= {"BRAID_COUNTED": str(counts), "PYTHONPATH": f"{COUNTING}:{tree}"}
    held, seen = used_shared_memory(), list[tuple[int, int]]()
    with (folder / "said.txt").open("w+") as said:
        run = psutil.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said)
        while run.poll() is None:
            seen.append((used_shared_memory() - held, memory_of(run)))
            time.sleep(0.02)
        said.seek(0)
        lines = said.read().splitlines()
        if run.returncode:
            sys.exit("\n".join(lines[-20:]))
    if counts is not None:
        return copies_in(counts, size)
    metrics = [json.loads(line) for line in (folder / lines[0] / "metrics.jsonl").read_text().splitlines()][1:]
    found: dict[str, Any] = {
        name: statistics.median(step[key] for step in metrics if step.get(key) is not None)
        for name, key in SECONDS.items()
    }
    shared, memory = zip(*seen, strict=True)
    return found | {"shared_memory_models": max(shared) / size, "memory_models": max(memory) / size}


def copies_in(counts: Path, size: int) -> dict[str, float]:
    """Return how many times the model's bytes are copied for one version: by the trainer that writes it, and by the
    engine.
    """
    calls = [json.loads(line) for line in counts.read_text().splitlines()]
    versions = {kind: sum(call["kind"] == kind for call in calls) for kind in ("write", "load")}

    def models(*kinds: str) -> float:
        copied = sum(call["torch"] + call["system"] for call in calls if call["kind"] in kinds)
        return copied / versions[kinds[0]] / size

    return {"trainer_copies_models": models("write"), "engine_copies_models": models("load", "receive")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="a commit to measure beside the working tree")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    from transformers import AutoModelForCausalLM, Qwen3Config

    from tests.tiny import SIZES, TOKENIZER, write_jsonl

    large = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS, "head_dim": 64}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES | large | heads))
    size = sum(parameter.nbytes for parameter in model.parameters())
    trees = ({"before": tree_of(arguments.against)} if arguments.against else {}) | {"now": ROOT}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory(prefix="braid-update-") as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        TOKENIZER.save_pretrained(folder / "model")
        del model
        write_jsonl(folder / "train.jsonl", [{"prompt": str(n % 10), "answer": "0"} for n in range(64)])
        for _ in range(arguments.turns):
            for version, tree in trees.items():
                found[version].append(measured(tree, folder, arguments.steps, size))
                print(version, json.dumps(found[version][-1]), flush=True)
        for policy in ("end", "delayed"):
            for version, tree in trees.items():
                copies = measured(tree, folder, 2, size, policy, folder / "counts.jsonl")
                print(version, policy, json.dumps(copies), flush=True)
    middle = {
        v: {key: statistics.median(turn[key] for turn in turns) for key in turns[0]} for v, turns in found.items()
    }
    print(json.dumps({"model_bytes": size, **middle}, indent=1))


if __name__ == "__main__":
    main()
