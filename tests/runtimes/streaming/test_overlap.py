"""Overlap in real processes, proven without timing: rows train while the longest of their batch still generate, and
while the weights of the previous batch are copied.

The longest answer continues only when half of its batch has been through `forward_backward`, according to the trainer's
trace. If training waited for the end of generation, or episodes for each other, it would never end.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from braidrl.observe.metrics import read_metrics
from braidrl.observe.trace import Span, read_trace
from tests.tiny import Workshop, recorded, sums, write_jsonl, write_model

ROWS = 32
ENVIRONMENTS = '''
import json
import os
import time
from pathlib import Path

from braidrl.agents.turns import Observation


class LongTailed:
    """One turn; in one row of the second group twelve, once half of the batch is trained on.

    Every third group is all wrong.
    """

    def __init__(self, trace, half):
        self.trace, self.half, self.turns = Path(trace), half, 0

    def reset(self, example):
        self.group, self.sample = example["group"], example["sample"]
        self.longest = self.group == 1 and self.sample == 3

    def trained(self):
        spans = [json.loads(line) for line in self.trace.read_text().splitlines()] if self.trace.exists() else []
        updates = [span for span in spans if span["stage"] == "actor.update" and span["iteration"] == 1]
        return sum(span["rows"] for span in updates)

    def step(self, text):
        while self.longest and self.trained() < self.half:
            time.sleep(0.01)
        self.turns += 1
        right = float(self.group % 3 > 0 and self.sample % 2)
        done = self.turns == (12 if self.longest else 1)
        return Observation("1+1=", right if done else 0.0, done, correct=bool(right))


class Logged:
    """Appends when each trajectory begins and ends; several processes write to one file."""

    def __init__(self, file):
        self.file = file

    def log(self, change):
        file = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, (json.dumps([time.monotonic(), change]) + "\\n").encode())
        os.close(file)

    def reset(self, example):
        self.log(1)

    def step(self, text):
        return Observation("", float(text[:1] in set("02468")), done=True)

    def close(self):
        self.log(-1)
'''

HELD = '''
import multiprocessing
import os
import threading
from pathlib import Path

import torch

from braidrl.algorithms.registry import shapes
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.saving.checkpoints import BackgroundWriter
from braidrl.runtimes.streaming.weights import VersionWriter

LIMIT_S = 60.0
started, trained, due = threading.Event(), threading.Event(), threading.Event()
begin, wait = VersionWriter.begin, BackgroundWriter.wait
forward_backward, optim_step = StageExecutor.forward_backward, StageExecutor.optim_step


def held_begin(self):
    """The first copy goes on when rows of the next batch were trained on and their step waits for it, or was made."""
    write = begin(self)
    if started.is_set():
        return write
    started.set()
    before = {name: part.merged().local.clone() for name, part in self.parts().items()}

    def held_write():
        assert trained.wait(LIMIT_S), "training waits for the copy"
        assert due.wait(LIMIT_S), "no step is due before the copy has ended"
        now = {name: part.merged().local for name, part in self.parts().items()}
        assert all(torch.equal(tensor, before[name]) for name, tensor in now.items()), "a step came in"
        Path(__file__).with_name(f"{os.getpid()}.held").touch()
        return write()

    return held_write


def noted_wait(self):
    if self.is_running and trained.is_set():
        due.set()
    return wait(self)


def noted_forward_backward(self, *arguments):
    losses = forward_backward(self, *arguments)
    if started.is_set():
        trained.set()
    return losses


def noted_step(self, *arguments, **more):
    optim_step(self, *arguments, **more)
    if trained.is_set():
        due.set()


# In workers alone: other tests run in the main process.
if multiprocessing.parent_process() is not None:
    VersionWriter.begin, BackgroundWriter.wait = held_begin, noted_wait
    StageExecutor.forward_backward, StageExecutor.optim_step = noted_forward_backward, noted_step


@shapes.register(writes=["reward"])
def while_held(reward):
    return reward
'''
HELD_FLOW = """flow: held
stages:
- {type: generate, role: actor}
- {type: verify, role: reward}
- {type: "held.py:while_held"}
- {type: advantage.group_normalized}
- {type: update, role: actor, params: {loss: {name: clip}, old: rollout}}
"""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("overlap")
    for name, content in {"worlds.py": ENVIRONMENTS, "held.py": HELD, "held.yaml": HELD_FLOW}.items():
        (folder / name).write_text(content)
    return Workshop(folder, write_model(folder / "model", "qwen2"), write_jsonl(folder / "train.jsonl", sums(64)))


def spans_of(run: Path, stage: str, iteration: int) -> list[Span]:
    result = [span for span in read_trace(run) if span.stage == stage and span.iteration == iteration]
    return [span for span in result if span.state == "busy" and span.rows]


@pytest.mark.parametrize("flow", ["grpo", "dapo"])
def test_half_of_a_batch_is_trained_on_before_its_generation_ends(workshop: Workshop, flow: str) -> None:
    trace = workshop.folder / flow / "trace" / "actor-0.jsonl"
    environment = {
        "name": f"{workshop.folder}/worlds.py:LongTailed",
        "params": {"trace": str(trace), "half": ROWS // 2},
    }
    run = workshop.run(
        flow,
        flow=flow,
        runtime="streaming",
        rollout={"environment": environment, "max_response_tokens": 4},
        trainer={"steps": 1, "prompts_per_step": 8},
        streaming={"dispatch_rows": 8},
    )
    lengths = recorded(run, 1)["action_tokens"].sort().values
    assert lengths[-1] > 5 * lengths[ROWS // 2], "the tail is long"
    generation_ends = max(span.end for span in spans_of(run, "actor.generate", 1))
    training = spans_of(run, "actor.update", 1)
    assert training[0].start < generation_ends
    assert sum(span.rows for span in training if span.end < generation_ends) >= ROWS // 2
    assert sum(span.rows for span in training) == ROWS


@pytest.mark.soak
@pytest.mark.parametrize("layout", [{"data": 2}, pytest.param({"data": 2, "shard": "full"}, marks=pytest.mark.soak)])
def test_weights_are_copied_during_next_batch_before_its_step(workshop: Workshop, layout: dict[str, Any]) -> None:
    """The copy of the first version would never end if training waited for it, and fails if a step changes what it
    reads.
    """
    run = workshop.run(
        "-".join(["held", *layout]),
        flow=str(workshop.folder / "held.yaml"),
        runtime="streaming",
        trainer={"steps": 3, "max_staleness": 1, "layout": layout},
    )
    held = list(workshop.folder.glob("*.held"))
    assert len(held) == 2, "each rank has copied its share"
    for mark in held:
        mark.unlink()
    assert recorded(run, 2)["version"].unique().tolist() == [0]
    assert recorded(run, 3)["version"].min() >= 1
    assert max(line.get("weights/actor/write_seconds", 0.0) for line in read_metrics(run)) > 0


def test_so_many_episodes_are_played_at_once_by_all_workers_together(workshop: Workshop) -> None:
    log = workshop.folder / "played.jsonl"
    environment = {"name": f"{workshop.folder}/worlds.py:Logged", "params": {"file": str(log)}, "at_once": 3}
    workshop.run(
        "played",
        runtime="streaming",
        rollout={"environment": environment, "max_response_tokens": 4},
        trainer={"steps": 1},
        streaming={"workers": {"actor.generate": 2}, "dispatch_rows": 4},
    )
    under_way, most = 0, 0
    for _, change in sorted(json.loads(line) for line in log.read_text().splitlines()):
        under_way += change
        most = max(most, under_way)
    assert under_way == 0 and 1 < most <= 3
