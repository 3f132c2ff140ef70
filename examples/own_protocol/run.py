"""A session that calls user-defined worker methods between the roles' stages.

python examples/arithmetic/demo.py             # makes the model and the data
python examples/own_protocol/run.py cluster.cpus=2
"""

from __future__ import annotations

import sys
from pathlib import Path

from braidrl.config import load_config
from braidrl.flow import advantage, loss
from braidrl.runtimes.session import Session


def main(overrides: list[str]) -> None:
    config = load_config(Path(__file__).parent / "run.yaml", overrides)
    with Session(config) as session:
        print("workers:", len(set(session.actor.process_id())))
        for step in range(1, config.trainer.steps + 1):
            rows = session.actor.generate(session.prompts())
            rows = session.actor.surprise(rows, 1.0)
            rows = session.reward.verify(rows)
            rows = session.run(advantage.group_normalized(), rows)
            session.actor.update(rows, loss=loss.clip(), old="self")
            index = session.index(rows)
            means = {name: float(index[name].mean()) for name in ("score", "surprise")}
            print(f"step {step}  score {means['score']:.3f}  surprise {means['surprise']:.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
