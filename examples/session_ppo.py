"""PPO as a plain loop: eight lines by hand in place of a recipe, on one process or on a Ray cluster.

python examples/arithmetic/demo.py                            # makes the model and the data
python examples/session_ppo.py                                # one process
python examples/session_ppo.py runtime=hybrid placement=split cluster.cpus=2
"""

from __future__ import annotations

import sys
from pathlib import Path

from braidrl.config import load_config
from braidrl.flow import advantage, loss, shape
from braidrl.runtimes.session import Session


def main(overrides: list[str]) -> None:
    config = load_config(Path(__file__).parent / "session_ppo.yaml", overrides)
    with Session(config) as session:
        for step in range(1, config.trainer.steps + 1):
            rows = session.prompts()
            rows = session.actor.generate(rows)
            rows = session.reward.verify(rows)
            rows = session.reference.log_probs(rows)
            rows = session.critic.values(rows)
            rows = session.run(shape.kl_penalty(coef=0.001), rows)
            rows = session.run(advantage.gae(gamma=1.0, lam=0.95), rows)
            session.critic.update(rows, loss=loss.value(clip=0.2))
            session.actor.update(rows, loss=loss.clip())
            score = float(session.index(rows)["score"].mean())
            print(f"step {step}  score {score:.3f}  grad norm {session.metrics()['actor/grad_norm']:.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
