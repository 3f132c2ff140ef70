"""`make demo`: reinforcement learning end to end on a CPU. It makes its data, tokenizer and model, and downloads
nothing.

random Qwen3 ──SFT on a careless teacher──▶ right about a third of the time ──DAPO──▶ right nearly always
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from task import demonstrations, problems, questions, write_jsonl, write_model

from braidrl.cluster.process import usable_cores
from braidrl.config import load_config
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from braidrl.runtimes.saving.checkpoints import export_model

HERE = Path(__file__).parent
HELD_OUT, TRAINED = 100, 4000
DIGITS = 2
RANKS = 4
"""The most processes of a run."""
SCORE = "eval/held_out/avg@8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=("qwen3", "qwen3_5_text"), default="qwen3", help="the model's architecture")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/arithmetic"), help="its earlier contents are replaced"
    )
    arguments = parser.parse_args()
    print("Learns to add by SFT, then DAPO, on this machine's CPU: three to ten minutes on two cores.", flush=True)
    start = time.perf_counter()
    run = learn(arguments.folder, arguments.seed, family=arguments.family)
    scores = [line[SCORE] for line in read_metrics(run) if line.get(SCORE) is not None]
    minutes = (time.perf_counter() - start) / 60
    print(
        f"Held-out avg@8 rose from {scores[0]:.2f} to {scores[-1]:.2f} in {minutes:.1f} minutes; "
        f"curves and sample responses: {run / 'report.html'}"
    )


def learn(
    folder: Path,
    seed: int,
    held_out: int = HELD_OUT,
    warm_start: Sequence[str] = (),
    dapo: Sequence[str] = (),
    family: str = "qwen3",
) -> Path:
    """Make data and model, warm-start, then train by DAPO; return the run folder of DAPO.

    `warm_start` and `dapo` are overrides of the two configurations.
    """
    clear(folder)
    pairs = problems(held_out + TRAINED, DIGITS, seed)
    write_jsonl(folder / "held_out.jsonl", questions(pairs[:held_out]))
    write_jsonl(folder / "train.jsonl", questions(pairs[held_out:]))
    write_jsonl(folder / "demonstrations.jsonl", demonstrations(pairs[held_out:], mistakes=0.55, seed=seed))
    write_model(folder / "untrained", seed, family=family)
    common = [f"seed={seed}", f"output={folder}", *across_cores()]
    warm = train(
        load_config(
            HERE / "warm_start.yaml",
            [
                *common,
                f"model={folder}/untrained",
                f"data.train={folder}/demonstrations.jsonl",
                *warm_start,
            ],
        )
    )
    export_model(warm, folder / "warm-start-model")
    return train(
        load_config(
            HERE / "config.yaml",
            [
                *common,
                f"model={folder}/warm-start-model",
                f"data.train={folder}/train.jsonl",
                f"data.eval.held_out={folder}/held_out.jsonl",
                *dapo,
            ],
        )
    )


def across_cores() -> list[str]:
    """Return overrides that run one rank per core, up to `RANKS`; the result is that of one rank.

    With so few weights most of a step is not arithmetic, and a second thread hardly helps. On two cores two ranks
    reached 18,500 tokens per second; one rank reached 11,100 with one thread and 13,200 with two.
    """
    ranks = min(usable_cores(), RANKS)
    return ["device=cpu", "runtime=distributed", f"workers={ranks}"] if ranks > 1 else ["device=cpu"]


def clear(folder: Path) -> None:
    """Remove an earlier demo's files. Exits if the folder holds anything else."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "demonstrations.jsonl").is_file():
        raise SystemExit(f"{folder} is not empty and holds no earlier demo; choose another folder with --folder")
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # The run has printed how to resume.
