"""Algorithms as plain loops instead of recipes: PPO, and the changes for ReMax and Safe-RLHF (figure 6 of arXiv
2409.19256).

python examples/arithmetic/demo.py                            # makes the model and the data
python examples/session.py ppo                                # one process
python examples/session.py remax runtime=hybrid placement=split cluster.cpus=2
torchrun --nproc-per-node 2 examples/session.py ppo runtime=distributed
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from braidrl.config import load_config
from braidrl.flow import loss
from braidrl.runtimes.session import Session


def ppo(session: Session) -> Iterator[Any]:
    for rows in session.batches():
        rows = session.actor.generate(rows)
        rows = session.reward.verify(rows)
        rows = session.reference.log_probs(rows)
        rows = session.critic.values(rows)
        rows = session.shape.kl_penalty(rows, coef=0.01)
        rows = session.advantage.gae(rows, gamma=1.0, lam=0.95)
        session.critic.update(rows, loss=loss.value(clip=0.2))
        session.actor.update(rows, loss=loss.clip())
        yield rows


def remax(session: Session) -> Iterator[Any]:
    """Train by ReMax, without a critic: a response's baseline is the reward of its prompt's greedy response."""
    for rows in session.batches():
        rows = session.actor.generate(rows)
        rows = session.actor.generate(rows, into="greedy", greedy=True)
        rows = session.reward.verify(rows)
        rows = session.reward.verify(rows, of="greedy")
        rows = session.advantage.remax(rows)
        rows = session.reference.log_probs(rows)
        rows = session.shape.advantage_kl_penalty(rows, coef=0.01)
        session.actor.update(rows, loss=loss.reinforce(), aggregate="seq-mean-token-sum")
        yield rows


def safe_rlhf(session: Session) -> Iterator[Any]:
    """Train by Safe-RLHF: PPO plus five lines for a cost model, a critic of costs, and a penalty shared by both
    advantages.
    """
    for rows in session.batches():
        rows = session.actor.generate(rows)
        rows = session.reward.verify(rows)
        rows = session.cost.score(rows)
        rows = session.reference.log_probs(rows)
        rows = session.critic.values(rows)
        rows = session.cost_critic.values(rows)
        rows = session.shape.safe_rlhf_kl_penalty(rows, coef=0.01)
        rows = session.advantage.gae(rows, gamma=1.0, lam=0.95)
        rows = session.advantage.cost_gae(rows, gamma=1.0, lam=0.95)
        rows = session.advantage.safe_rlhf(rows, threshold=0.0, learning_rate=0.1, multiplier=1.0)
        session.critic.update(rows, loss=loss.value(clip=0.2))
        session.cost_critic.update(rows, loss=loss.value(clip=0.2))
        session.actor.update(rows, loss=loss.clip())
        yield rows


def main(algorithm: str, *overrides: str) -> None:
    config = load_config(Path(__file__).parent / "session.yaml", [f"flow={algorithm}", *overrides])
    with Session(config) as session:
        for step, rows in enumerate({"ppo": ppo, "remax": remax, "safe_rlhf": safe_rlhf}[algorithm](session), 1):
            score, norm = float(session.index(rows)["score"].mean()), session.metrics()["actor/grad_norm"]
            if session.world.first:
                print(f"step {step}  score {score:.3f}  grad norm {norm:.3f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
