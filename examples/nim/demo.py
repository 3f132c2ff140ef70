"""`python -m examples.nim.demo`: a model learns nim by playing against itself, on a CPU in some minutes.

Prints its share of won games against a random and a perfect opponent, before and after. It begins each game with a
number of stones from which a perfect player wins.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from braidrl.config import load_config
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from examples.nim.game import MOST_TAKEN
from examples.small_model import make_tokenizer, write_jsonl, write_model

HERE = Path(__file__).parent
STONES = range(1, 13)
OPPONENTS = ("random", "perfect")


def prepare(folder: Path, seed: int) -> None:
    """Write data and an untrained model."""
    shutil.rmtree(folder, ignore_errors=True)
    write_jsonl(folder / "games.jsonl", ({"prompt": "nim", "stones": stones} for stones in STONES))
    won = [stones for stones in STONES if stones % (MOST_TAKEN + 1)]
    for opponent in OPPONENTS:
        games = ({"prompt": "nim", "stones": stones, "opponent": opponent} for stones in won for _ in range(4))
        write_jsonl(folder / f"{opponent}.jsonl", games)
    write_model(folder / "model", make_tokenizer(list(map(str, STONES)), "nim stones take"), seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/nim"), help="its contents are replaced")
    parser.add_argument("changes", nargs="*", help="key=value")
    arguments = parser.parse_args()
    folder = arguments.folder
    prepare(folder, arguments.seed)
    sets = [f"data.eval.{opponent}={folder}/{opponent}.jsonl" for opponent in OPPONENTS]
    changes = [f"seed={arguments.seed}", f"model={folder}/model", f"output={folder}", *sets, *arguments.changes]
    run = train(load_config(HERE / "config.yaml", [*changes, f"data.train={folder}/games.jsonl"]))
    for opponent in OPPONENTS:
        won = [
            line[f"eval/{opponent}/avg@4"]
            for line in read_metrics(run)
            if line.get(f"eval/{opponent}/avg@4") is not None
        ]
        print(f"against a {opponent} opponent: {won[0]:.2f} to {won[-1]:.2f} of the games won")


if __name__ == "__main__":
    main()
