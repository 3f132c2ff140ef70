"""`python -m examples.outside_agent.demo`: train a model inside an existing agent until it calls the right tool.

random model ──SFT on a teacher that often takes any tool──▶ ──GRPO on the agent's conversations──▶ right nearly always
"""

from __future__ import annotations

from pathlib import Path

from braidrl.config import load_config
from braidrl.runtimes.restarts import train
from braidrl.runtimes.saving.checkpoints import export_model
from examples.tool_arithmetic.demo import prepare
from examples.two_stages import first_and_last

HERE = Path(__file__).parent
IMITATE = HERE.parent / "tool_arithmetic" / "warm_start.yaml"

__all__ = ["main", "prepare"]


def main() -> None:
    folder = Path("build/outside_agent")
    prepare(folder, seed=0)
    own = [f"model={folder}/untrained", f"data.train={folder}/demonstrations.jsonl", f"output={folder}"]
    export_model(train(load_config(IMITATE, own)), folder / "model")
    run = train(load_config(HERE / "config.yaml"))
    before, after = first_and_last(run, "eval/held_out/score_mean")
    print(f"The agent's score rose from {before:.2f} to {after:.2f}; sample responses: {run / 'report.html'}")


if __name__ == "__main__":
    main()
