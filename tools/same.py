"""Compare two versions of the code: the same short runs must give results that are equal to the bit.

    make same AGAINST=main              # the working tree beside a commit, by default the last one
    make same ONLY=dapo-hybrid          # only cases with this in their names

commit ──git archive──▶ build/same/before ──braid train──▶ run ──┐
working tree ──────────────────────────────braid train──▶ run ──┴▶ metrics.jsonl and final weights: equal?

Only the command line and the configuration are used, so that files and names inside the package may change.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "same"
LIMIT_S = 900.0
# Excluded metrics depend on a clock or the machine: seconds, rates, memory, observations during the run.
TIMED = ("time/", "throughput/", "utilisation/", "memory/", "weights/", "streaming/", "checks/", "speculation/")
SYMBOLS = ["<pad>", "<end>", *"0123456789+= "]
VERIFIER = 'def starts_even(response: str) -> bool:\n    return response[:1] in set("02468")\n'
# The recipe with two changes that make the result of streaming independent of the order of arrival: the critic waits
# for the whitening, and the target is so far off that the coefficient always takes its largest step.
PPO = """
flow: ppo
stages:
- {role: actor, type: generate}
- {role: reward, type: verify}
- {role: reference, type: log_probs}
- {role: critic, type: values}
- {type: shape.adaptive_kl_penalty, params: {coef: 0.05, target: 100.0}}
- {type: advantage.gae, params: {gamma: 1.0, lam: 0.95}}
- {type: advantage.whiten}
- {role: critic, type: update, params: {loss: {name: value, clip: 0.2}}, after: [advantage.whiten]}
- {role: actor, type: update, params: {loss: {name: clip, low: 0.2, high: 0.2}}}
"""

COMMON = f"""
    model={WORK}/model output={WORK}/runs data.train={WORK}/sums.jsonl reward.verify={WORK}/verifier.py:starts_even
    device=cpu dtype=float64 threads=1 cluster.cpus=4 evaluation.every=0 rollout.max_response_tokens=6 rollout.slots=16
    trainer.deterministic=true trainer.steps=3 trainer.prompts_per_step=4 trainer.learning_rate=3e-3
    trainer.checkpoint_every=0
"""
SEVERAL_UPDATES = "rollout.samples_per_prompt=4 trainer.rows_per_update=8 trainer.epochs=2"
FLOWS = {
    "grpo": f"flow=grpo {SEVERAL_UPDATES}",
    # Half of the groups of two rows are dropped, so that batches need refills.
    "dapo": "flow=dapo rollout.samples_per_prompt=2 algorithm.overlong_cache=2",
    "ppo": f"flow={WORK}/ppo.yaml {SEVERAL_UPDATES}",
}
DAPO_ROWS = 8
RUNTIMES = {
    "eager": "runtime=eager",
    "hybrid": "runtime=hybrid workers=2",
    "distributed": "runtime=distributed workers=2",
    # Each row is computed alone, because rounding can depend on the batch composition.
    "streaming": "runtime=streaming streaming.dispatch_rows=1",
}
CASES = {f"{flow}-{runtime}": f"{COMMON} {FLOWS[flow]} {RUNTIMES[runtime]}" for flow in FLOWS for runtime in RUNTIMES}
# An update with this aggregation begins when all of its rows are there, and adds them in order. PPO's update waits for
# the whitening.
CASES["grpo-streaming"] += " algorithm.aggregate=prompt-mean"
CASES["dapo-streaming"] += " algorithm.aggregate=prompt-mean"
VLLM = ROOT / "build" / "vllm-venv" / "bin" / "python"
# vLLM has no float64, and its kernels for CPUs need heads of 32 or more.
CASES["grpo-vllm"] = (
    f"{CASES['grpo-eager']} model={WORK}/wide dtype=float32 rollout.engine=vllm rollout.reproducible=true "
    f"rollout.python={VLLM}"
)


def difference(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return the first name whose numbers or arrays differ, with both values, or None if all are equal to the bit."""
    for name in before | after:
        values = different(before.get(name, "nothing"), after.get(name, "nothing"))
        if values:
            return f"{name}: {values[0]} before, {values[1]} after"
    return None


def different(before: Any, after: Any) -> tuple[Any, Any] | None:
    """Return both values (of arrays, the first numbers) that differ in any bit: NaN equals NaN, and 0.0 differs from
    -0.0.
    """
    if not (isinstance(before, np.ndarray) and isinstance(after, np.ndarray)):
        return None if repr(before) == repr(after) else (before, after)
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        return f"{before.dtype} {before.shape}", f"{after.dtype} {after.shape}"
    one, other = (np.ascontiguousarray(array).reshape(-1) for array in (before, after))
    places = np.flatnonzero(one.view(f"u{one.itemsize}") != other.view(f"u{one.itemsize}"))
    return (one[places[0]].item(), other[places[0]].item()) if len(places) else None


def results(run: Path) -> dict[str, Any]:
    """Return every number in a run's metrics except times, step by step, then every tensor in its last checkpoint, by
    name.
    """
    found: dict[str, Any] = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        found |= {f"{key} of step {line['step']}": line[key] for key in sorted(line) if not key.startswith(TIMED)}
    checkpoint = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    for file in sorted(checkpoint.rglob("*.safetensors")):
        found |= {f"{name} of {file.relative_to(checkpoint)}": array for name, array in load_file(file).items()}
    return found


def write_inputs() -> None:
    """Write the inputs of both versions: a tiny model with tokenizer, sums as prompts, a verifier and a flow."""
    # Imported here because comparing needs none of it.
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(SYMBOLS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    for name, head_dim in (("model", 8), ("wide", 32)):
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=len(SYMBOLS),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            max_position_embeddings=64,
            initializer_range=0.2,
            eos_token_id=1,
            pad_token_id=0,
        )
        Qwen3ForCausalLM(config).save_pretrained(WORK / name)
        fast.save_pretrained(WORK / name)
    draw = random.Random(0)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(64)]
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]
    for name, text in {"sums.jsonl": "\n".join(lines), "verifier.py": VERIFIER, "ppo.yaml": PPO}.items():
        (WORK / name).write_text(text)


def check_out(commit: str) -> Path:
    """Return a folder with the files of a commit, outside git's records."""
    folder = WORK / "before"
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def train(case: str, version: str, code: Path) -> dict[str, Any]:
    """Train a case with the package in `code` and return its results.

    Raises RuntimeError with the last lines of a failed run.
    """
    name = f"{case}-{version}"
    command = [sys.executable, "-m", "braidrl.cli", "train", *CASES[case].split(), f"name={name}"]
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    log = WORK / f"{name}.log"
    with log.open("w") as file:
        try:
            # In that version's folder, where Python finds its package first.
            subprocess.run(command, cwd=code, env=environment, stdout=file, stderr=file, timeout=LIMIT_S, check=True)
        except subprocess.SubprocessError as error:
            raise RuntimeError("\n".join([str(error), *log.read_text().splitlines()[-20:]])) from error
    return results(WORK / "runs" / name)


def compare(case: str, before: Path) -> str | None:
    """Train a case with both versions; return their difference, or the failure.

    New metrics are printed, not compared.
    """
    try:
        ours, theirs = train(case, "before", before), train(case, "after", ROOT)
    except RuntimeError as error:
        return str(error)
    if "dapo" in case and all(v <= DAPO_ROWS for name, v in ours.items() if name.startswith("rows/generated")):
        return "no batch needed more groups than it began with, so that this case says nothing about refills"
    added = {name for name in theirs.keys() - ours.keys() if " of step " in name}
    if added:
        print(f"{case}: the working tree also has {', '.join(sorted({name.split(' of step ')[0] for name in added}))}")
    return difference(ours, {name: value for name, value in theirs.items() if name not in added})


def compare_all(cases: list[str], before: Path) -> bool:
    """Run two cases at a time, print a line for each as it ends, and return whether all are equal."""
    start, equal = time.monotonic(), True
    with ThreadPoolExecutor(2) as pool:
        running = {pool.submit(compare, case, before): case for case in cases}
        try:
            for done in as_completed(running):
                print(f"{time.monotonic() - start:4.0f} s  {running[done]:18}  {done.result() or 'equal'}", flush=True)
                equal = equal and done.result() is None
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the results of the working tree with those of a commit.")
    parser.add_argument("against", nargs="?", default="HEAD", help="a commit")
    parser.add_argument("--only", default="", help=f"part of the names of {', '.join(CASES)}")
    arguments = parser.parse_args()
    chosen = [case for case in CASES if arguments.only in case] or parser.error(f"no case is called {arguments.only}")
    if "grpo-vllm" in chosen and not VLLM.is_file():
        print("grpo-vllm is left out: `make vllm` installs what it needs")
        chosen.remove("grpo-vllm")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    write_inputs()
    equal = compare_all(chosen, check_out(arguments.against))
    print(f"{'Equal to' if equal else 'DIFFERENT from'} {arguments.against}; the runs are in {WORK / 'runs'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
