"""Streaming runs of some length: memory that stays as it is, and workers killed at random moments in each way to take
new weights.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from braidrl.cluster.shared_memory import PREFIX, shared_folder
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import latest_checkpoint, read_state
from braidrl.runtimes.streaming.orders import StreamingBackend
from tests.tiny import Workshop, braid, recorded, sums, wait_for_steps, write_jsonl, write_model

pytestmark = pytest.mark.soak

WAYS = ["end", "delayed", "rolling", "interrupt"]
KINDS = ["actor.generate", "reference", "actor"]
STEPS, PROMPTS, SAMPLES = 16, 4, 4
STALENESS = {None: 1, 8: 2}
"""Staleness by token budget; one of the versions is for the resumption of suspended rows."""
LONG, SETTLED = 200, 40
"""Iterations of the run whose memory is watched, and after how many of them it has been through everything that there
is.
"""


FLOW = """flow: watched
stages:
- {type: generate, role: actor}
- {type: verify, role: reward}
- {type: select.informative_groups}
- {type: log_probs, role: reference}
- {type: shape.kl_penalty, params: {coef: 0.05}}
- {type: advantage.reinforce_plus_plus}
- {type: update, role: actor, params: {loss: {name: clip}, old: rollout}}
"""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("long")
    return Workshop(folder, write_model(folder / "model", "qwen2"), write_jsonl(folder / "train.jsonl", sums(64)))


def sections_of(
    workshop: Workshop, weights: str, steps: int = STEPS, tokens: int = 40, budget: int | None = None, every: int = 1
) -> dict[str, Any]:
    """A flow with selection and a reference, two engines and a staleness of one, or of two if rows may be suspended."""
    (workshop.folder / "watched.yaml").write_text(FLOW)
    return {
        "flow": str(workshop.folder / "watched.yaml"),
        "runtime": "streaming",
        "rollout": {"max_response_tokens": tokens, "samples_per_prompt": SAMPLES, "tokens_per_iteration": budget},
        # A model that learns would soon have no group left to select.
        "trainer": {
            "steps": steps,
            "prompts_per_step": PROMPTS,
            "rows_per_update": 8,
            "learning_rate": 1e-6,
            "max_staleness": STALENESS[budget],
            "surplus": "keep" if budget else "drop",
            "max_restarts": 1,
            "checkpoint_every": every,
        },
        "streaming": {"weights": weights, "workers": {"actor.generate": 2}},
    }


class Watched:
    """Bytes and segments that a run has in shared memory, the most of each iteration."""

    def __init__(self, backend: StreamingBackend) -> None:
        self.backend, self.most = backend, dict[int, tuple[int, int]]()
        self.pattern = f"{PREFIX}{backend.control.data.segments.run}-*"
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while not self.ended.wait(0.005):
            iteration, sizes = self.backend.stream.schedule.progress.published, list[int]()
            for path in shared_folder().glob(self.pattern):
                with suppress(FileNotFoundError):
                    sizes.append(path.stat().st_size)
            before = self.most.get(iteration, (0, 0))
            self.most[iteration] = max(before[0], sum(sizes)), max(before[1], len(sizes))

    def end(self) -> None:
        self.ended.set()
        self.thread.join()

    def largest(self, iterations: range) -> tuple[int, int]:
        """Bytes, and segments."""
        seen = [self.most[n] for n in iterations if n in self.most]
        return max(size for size, _ in seen), max(count for _, count in seen)


@pytest.mark.parametrize("weights", ["end", "interrupt"])
def test_shared_memory_is_flat_over_two_hundred_iterations(workshop: Workshop, weights: str) -> None:
    sections = sections_of(workshop, weights, LONG, tokens=8, every=0)
    with TrainingRun(workshop.config(f"flat-{weights}", **sections)) as run:
        assert isinstance(run.backend, StreamingBackend)
        watched = Watched(run.backend)
        try:
            run.train()
        finally:
            watched.end()
    assert len(read_metrics(run.folder)) == LONG
    early, late = watched.largest(range(SETTLED, LONG // 2)), watched.largest(range(LONG // 2, LONG + 1))
    print(f"{weights}: (bytes, segments) at most {early} up to iteration {LONG // 2}, {late} after it")
    # One segment more for each iteration would be twice as many.
    assert late[0] < 1.3 * early[0] and late[1] < 1.3 * early[1]


class Killer(threading.Thread):
    """Kills a worker of each kind, in an order and at moments that a seed draws, whatever it does then."""

    def __init__(self, backend: StreamingBackend, seed: int) -> None:
        super().__init__(daemon=True)
        self.backend, self.chance, self.killed = backend, random.Random(seed), list[str]()
        self.kinds = self.chance.sample(KINDS, len(KINDS))

    def run(self) -> None:
        for number, kind in enumerate(self.kinds):
            # A trainer comes back from a checkpoint: the first must be there.
            while self.backend.stream.schedule.progress.published < 2 + 3 * number:
                time.sleep(0.001)
            time.sleep(self.chance.uniform(0, 0.3))
            victims = [member for member in self.backend.processes.members if member.group.name == kind]
            if victims:
                os.kill(self.chance.choice(victims).process.pid, signal.SIGKILL)
                self.killed.append(kind)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("budget", list(STALENESS))
@pytest.mark.parametrize("weights", WAYS)
def test_whichever_workers_are_killed_every_row_is_trained_once_or_counted(
    workshop: Workshop, weights: str, budget: int | None, seed: int
) -> None:
    sections = sections_of(workshop, weights, budget=budget)
    with TrainingRun(workshop.config(f"killed-{weights}-{budget}-{seed}", **sections)) as run:
        assert isinstance(run.backend, StreamingBackend)
        killer = Killer(run.backend, seed)
        killer.start()
        run.train()
        killer.join()
        sampling, seen = run.backend.stream.schedule.admission.sampling, run.backend.stream.schedule.max_staleness_seen
        assert sum(member.starts for member in run.backend.processes.members) >= len(KINDS) - 1
    assert sorted(killer.killed) == sorted(KINDS)
    ahead = {*sampling.pending, *sampling.verdicts, *sampling.waiting}
    check_account(run.folder, sampling.admitted + 1, ahead, STALENESS[budget])
    assert seen <= STALENESS[budget]
    if budget is not None:
        rows = [row for step in range(1, STEPS + 1) for row in recorded(run.folder, step)["rollout_versions"].tolist()]
        assert any(len(set(versions)) > 1 for versions in rows), "rows were set aside and have gone on"


@pytest.mark.parametrize("budget", list(STALENESS))
@pytest.mark.parametrize("weights", WAYS)
def test_killed_main_process_resumes_with_exact_counts(workshop: Workshop, weights: str, budget: int | None) -> None:
    name, chance = f"main-{weights}-{budget}", random.Random(f"{weights}/{budget}")
    folder = workshop.folder / name
    process = braid("train", workshop.config_file(name, **sections_of(workshop, weights, budget=budget)))
    wait_for_steps(folder, 3, process)
    time.sleep(chance.uniform(0, 0.5))
    process.kill()
    process.communicate()
    again = braid("train", "--resume", folder)
    _, output = again.communicate(timeout=300)
    assert again.returncode == 0, output
    last = latest_checkpoint(folder)
    assert last is not None
    sampling = read_state(last)["sampling"]
    ahead = {*sampling["pending"], *(group for group, _ in sampling["waiting"])}
    check_account(folder, sampling["admitted"] + 1, ahead, STALENESS[budget])


def check_account(folder: Path, admitted: int, ahead: set[int], staleness: int) -> None:
    """Every group was trained once with all of its rows, was dropped and counted, or is ahead of the last batch."""
    lines = read_metrics(folder)
    print(f"rows drawn again for a trainer: {sum(line['streaming/rows_drawn_again'] for line in lines):.0f}")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    uids = [uid for step in range(1, STEPS + 1) for uid in recorded(folder, step).uids()]
    assert len(uids) == len(set(uids)) == STEPS * PROMPTS * SAMPLES
    trained = {uid[1] for uid in uids}
    assert len(trained) == STEPS * PROMPTS and not trained & ahead
    dropped = sum(count for line in lines for name, count in line.items() if name.startswith("groups/dropped/"))
    assert len(trained) + dropped + len(ahead) == admitted
    assert max(line["staleness/max"] for line in lines) <= staleness
