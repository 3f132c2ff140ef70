"""`python -m examples.turn_credit.demo`: credit by row and by turn, on a task of which only the first turn can be
learned.

Prints the share of right first turns after equal steps, three seeds each.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from braidrl.config import load_config
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from examples.small_model import make_tokenizer, write_jsonl, write_model

HERE = Path(__file__).parent
DOORS = [str(number) for number in range(1, 9)]


def prepare(folder: Path, seed: int) -> None:
    """Write data and an untrained model."""
    shutil.rmtree(folder, ignore_errors=True)
    write_jsonl(folder / "doors.jsonl", ({"prompt": "door"} for _ in range(64)))
    write_model(folder / "model", make_tokenizer(DOORS, "door luck"), seed)


def main() -> None:
    for seed in range(3):
        prepare(Path("build/turn_credit"), seed)
        shares = []
        for flow in ("row_credit", "turn_credit"):
            changes = [f"flow={HERE / flow}.yaml", f"seed={seed}", f"name={flow}"]
            run = train(load_config(HERE / "config.yaml", changes))
            shares.append(read_metrics(run)[-1]["eval/doors/avg@4"])
        print(f"seed {seed}: right first turns {shares[0]:.2f} with credit by row, {shares[1]:.2f} by turn")


if __name__ == "__main__":
    main()
