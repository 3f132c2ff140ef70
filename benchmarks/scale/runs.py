"""Settings, data, and a training run that counts each step, for the simulated runs of all runtimes."""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.scale.played import GROUPS, SAMPLES, AnyGap
from braidrl.config import Config, load_config
from braidrl.runtimes.evaluation import RunScores
from braidrl.runtimes.interfaces import Backend
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.checkpoints import RunState
from braidrl.runtimes.step_metrics import StepMetrics


def settings(folder: Path, trainers: int, steps: int, *others: str) -> Config:
    """Return the configuration of a GRPO run of `steps` steps with this many trainer ranks; `others` are its own keys,
    which win.
    """
    shared = [
        "flow=grpo",
        "threads=1",
        "device=cpu",
        f"model={folder / 'model'}",
        f"data.train={folder / 'lines.jsonl'}",
        "reward.verify=gsm8k",
        "reward.sandbox=none",
        f"rollout.samples_per_prompt={SAMPLES}",
        "rollout.max_response_tokens=1",
        f"trainer.prompts_per_step={GROUPS * trainers}",
        f"trainer.steps={steps}",
        "trainer.checkpoint_every=0",
        "trainer.max_tokens_per_device=256",
        f"output={folder / 'runs'}",
        f"data.eval.held_out={folder / 'lines.jsonl'}",
        f"evaluation.every={steps}",
        f"evaluation.samples={SAMPLES}",
        f"evaluation.max_prompts={GROUPS * trainers}",
    ]
    return load_config(folder / "run.yaml", [*shared, *others])


def write_sums(path: Path, count: int) -> None:
    """Write prompts of equal length, with their answers."""
    lines = [json.dumps({"prompt": f"{n % 90 + 10}+7=", "answer": str(n % 90 + 17)}) for n in range(count)]
    path.write_text("\n".join(lines) + "\n")


class CountedScores(RunScores):
    """Evaluations that are counted as a part of the run."""

    counting: Callable[[str], AbstractContextManager[None]]

    def measure(self, backend: Backend[Any], step: int) -> StepMetrics:
        with self.counting("evaluation"):
            return super().measure(backend, step)


class CountedRun(TrainingRun):
    """A training run that counts the seconds, messages and bytes of each step, evaluation and checkpoint."""

    def __init__(self, config: Config, counters: Callable[[], Mapping[str, float]], **named: Any) -> None:
        """`counters` returns the present seconds, messages and bytes."""
        self.counters, self.counted = counters, defaultdict[str, list[Counter[str]]](list)
        self.nested = Counter[str]()
        """The counts of parts inside the present one."""
        super().__init__(config, **named)

    @contextmanager
    def counting(self, part: str) -> Iterator[None]:
        """Count the block as a part of the run, without the parts inside it."""
        outer, self.nested, before = self.nested, Counter[str](), self.counters()
        yield
        taken = Counter({name: value - before[name] for name, value in self.counters().items()})
        counts = Counter(taken)
        counts.subtract(self.nested)
        self.counted[part].append(counts)
        outer.update(taken)
        self.nested = outer

    def _start_controller(self) -> None:
        super()._start_controller()
        self.gaps = AnyGap(0.0)
        self.scores = CountedScores(self.prepared, self.folder, self.checkpoints, self.world)
        self.scores.counting = self.counting

    def _one_step(self, state: RunState) -> None:
        with self.counting("step"):
            super()._one_step(state)

    def _save(self, state: RunState, wait: bool = False) -> None:
        with self.counting("checkpoint"):
            super()._save(state, wait=True)

    def parts(self, warm: int) -> dict[str, dict[str, float]]:
        """Return the median of the steps after some that warm caches, and of evaluations and checkpoints."""
        return {part: median(counts[warm if part == "step" else 0 :]) for part, counts in self.counted.items()}


def median(counted: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each counter; nothing without steps."""
    return {name: statistics.median(step[name] for step in counted) for name in (counted[0] if counted else ())}
