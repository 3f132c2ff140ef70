"""The four ways in which engines take new weights, in real runs: versions of rows and tokens, log-probs of each,
bounds, and results.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.observe.trace import read_trace
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import run_config
from braidrl.runtimes.streaming.generate import LOAD, RECEIVE
from braidrl.runtimes.streaming.orders import StreamingBackend
from tests.invariants.traces import EVERY_STEP, assert_same, merged, trace
from tests.tiny import Workshop, recorded, sums, write_jsonl, write_model

STEPS, PROMPTS = 4, 8
LONG: dict[str, Any] = {
    "runtime": "streaming",
    "algorithm": {"old": "rollout"},
    "rollout": {"max_response_tokens": 200, "samples_per_prompt": 4},
    "trainer": {
        "steps": STEPS,
        "prompts_per_step": PROMPTS,
        "rows_per_update": 16,
        "max_staleness": 1,
        "learning_rate": 3e-3,
        "checkpoint_every": 1,
        "keep_checkpoints": STEPS,
    },
}
"""Responses of many lengths: when a version is published, rows of the next batch are under way."""
WITHOUT_ABORT = """
class ToTheEnd:
    def __init__(self, spec): ...
    async def submit(self, request): ...
"""
SLOW_UNTIL_LOADED = f"""
import time
from examples.plugins.engine import PlainEngine

class SlowUntilLoaded(PlainEngine):
    def step(self):
        if all(group // {PROMPTS} > self.version for _, group, _ in self.rows):
            time.sleep(0.05)
        return super().step()
"""
"""An engine that is slow with the rows of a batch until it has the weights of the batch before, which a busy machine
trains meanwhile.
"""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("loading")
    return Workshop(folder, write_model(folder / "model", "qwen2"), write_jsonl(folder / "train.jsonl", sums(64)))


def streamed(workshop: Workshop, name: str, weights: str, **more: Any) -> tuple[Path, StreamingBackend]:
    streaming = {"weights": weights, "workers": {"actor.generate": 2}, **more.pop("streaming", {})}
    with TrainingRun(workshop.config(name, **merged(LONG, {"streaming": streaming, **more}))) as run:
        run.train()
        assert isinstance(run.backend, StreamingBackend)
    return run.folder, run.backend


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run)]


def check_bounds(run: Path) -> None:
    """Each row is trained once, and none of its tokens is older than allowed."""
    steps, config = steps_of(run), run_config(run)
    uids = [uid for step in steps for uid in recorded(run, step).uids()]
    assert len(uids) == len(set(uids)) == len(steps) * config.trainer.prompts_per_step * 4
    for step in steps:
        rows = recorded(run, step)
        oldest = [int(min(versions)) for versions in rows["rollout_versions"].tolist()]
        assert rows["version"].tolist() == oldest
        assert min(oldest) >= step - 2 and int(rows["rollout_versions"].values.max()) <= step
    assert max(line["staleness/max"] for line in read_metrics(run)) <= 1


def versions_within_rows(run: Path) -> Counter[int]:
    """Count rows by their number of versions."""
    rows = [row for step in steps_of(run) for row in recorded(run, step)["rollout_versions"].tolist()]
    return Counter(len(set(row)) for row in rows)


def weights_at(workshop: Workshop, run: Path, version: int) -> Path:
    return workshop.model if version == 0 else run / "checkpoints" / f"step-{version}" / "actor"


def largest_gap(workshop: Workshop, run: Path) -> float:
    """Return the largest difference between a token's log-prob and the model's own forward under the weights that drew
    it.
    """
    gap = 0.0
    for step in steps_of(run):
        rows = recorded(run, step)
        for version in rows["rollout_versions"].values.unique().tolist():
            model = AutoModelForCausalLM.from_pretrained(weights_at(workshop, run, version), dtype=torch.float32)
            for row in [n for n, own in enumerate(rows["rollout_versions"].tolist()) if n < 8 or len(set(own)) > 1]:
                drawn = rows["rollout_versions"][row] == version
                if drawn.any():
                    tokens, actions = rows["tokens"][row], rows["action_mask"][row]
                    with torch.no_grad():
                        logits = model(tokens[None]).logits[0, :-1].log_softmax(-1)
                    result = logits.gather(1, tokens[1:, None])[:, 0][actions[1:]]
                    gap = max(gap, float((result - rows["rollout_log_probs"][row])[drawn].abs().max()))
    return gap


def test_interrupted_rows_keep_log_probs_of_each_tokens_version(
    workshop: Workshop,
) -> None:
    # A batch takes far longer to generate than to train on, so that new weights find rows under way.
    many = {"steps": 3, "keep_checkpoints": 3, "prompts_per_step": 24, "rows_per_update": None}
    more = {"trainer": many, "rollout": {"slots": 16, "compile": False}, "algorithm": {"kl_coef": 0.0}}
    run, _ = streamed(workshop, "interrupt", "interrupt", streaming={"workers": {"actor.generate": 1}}, **more)
    check_bounds(run)
    counts = versions_within_rows(run)
    print(f"rows by the versions of their tokens: {counts}")
    assert counts[2] > 0
    assert largest_gap(workshop, run) < 1e-5


@pytest.mark.soak
def test_rolling_updates_give_batches_of_two_versions(workshop: Workshop) -> None:
    (workshop.folder / "slow.py").write_text(SLOW_UNTIL_LOADED)
    slow = {"engine": f"{workshop.folder}/slow.py:SlowUntilLoaded", "slots": 3, "max_response_tokens": 20}
    run, backend = streamed(workshop, "rolling", "rolling", rollout=slow)
    check_bounds(run)
    assert backend.control.loading.max_draining_seen == 1
    size = sum(t.nbytes for t in load_file(weights_at(workshop, run, 0) / "model.safetensors").values())
    lines = read_metrics(run)
    assert all(0 <= line[f"streaming/idle/{group}"] <= 1 for line in lines for group in ("actor.generate", "actor"))
    assert all(line["streaming/oldest_version"] <= line["step"] for line in lines)
    # Two engines of three slots; a worker takes as many rows while it checks finished ones.
    assert all(line["streaming/in_flight"] <= 12 for line in lines)
    assert max(line["streaming/in_flight"] for line in lines) > 0
    assert sum(line["streaming/weight_bytes"] for line in lines) > size * (STEPS - 2)
    mixed = [step for step in range(2, STEPS + 1) if len(recorded(run, step)["version"].unique()) == 2]
    assert len(mixed) >= STEPS - 2, "engines that go on while others load draw rows of two versions for most batches"
    assert largest_gap(workshop, run) < 1e-5


@pytest.mark.soak
def test_weight_bytes_are_those_that_engines_received_from_the_trainer(workshop: Workshop) -> None:
    trainer = {"steps": 3, "keep_checkpoints": 3}
    run, _ = streamed(workshop, "collective", "end", rollout={"weights": "collective"}, trainer=trainer)
    check_bounds(run)
    size = sum(t.nbytes for t in load_file(weights_at(workshop, run, 0) / "model.safetensors").values())
    received = [line["streaming/weight_bytes"] for line in read_metrics(run)]
    # Two engines; a line may miss what arrives after it.
    assert sum(received) % size == 0 and size <= sum(received) <= 2 * 3 * size, (received, size)


@pytest.mark.soak
def test_delayed_weights_are_received_while_the_engine_generates(workshop: Workshop) -> None:
    (workshop.folder / "slow.py").write_text(SLOW_UNTIL_LOADED)
    slow = {"engine": f"{workshop.folder}/slow.py:SlowUntilLoaded", "weights": "collective", "max_response_tokens": 20}
    trainer = {"steps": 3, "keep_checkpoints": 3}
    run, _ = streamed(workshop, "delayed-ahead", "delayed", rollout=slow, trainer=trainer)
    check_bounds(run)
    assert versions_within_rows(run).keys() == {1} and largest_gap(workshop, run) < 1e-5
    spans = [span for span in read_trace(run) if span.state == "busy"]
    received, loaded, drawn = (
        [span for span in spans if span.stage == stage] for stage in (RECEIVE, LOAD, "actor.generate")
    )
    assert received and max(one.version for one in received) < 3, "no batch starts on the last version"
    for one in received:
        (load,) = [span for span in loaded if (span.worker, span.version) == (one.worker, one.version)]
        assert one.end <= load.start
    pairs = ((one, row) for one in received for row in drawn if row.worker == one.worker)
    assert any(row.start < one.end and one.start < row.end for one, row in pairs)


@pytest.mark.parametrize("weights", [pytest.param("end", marks=pytest.mark.soak), "delayed"])
def test_engines_that_load_together_generate_each_batch_with_one_version(workshop: Workshop, weights: str) -> None:
    run, _ = streamed(workshop, weights, weights)
    check_bounds(run)
    assert versions_within_rows(run).keys() == {1}
    assert all(len(recorded(run, step)["version"].unique()) == 1 for step in range(1, STEPS + 1))


@pytest.mark.soak
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("weights", ["end", "delayed", "rolling", "interrupt"])
def test_no_token_is_older_than_allowed(workshop: Workshop, weights: str, staleness: int) -> None:
    trainer = {"max_staleness": staleness}
    run, _ = streamed(
        workshop,
        f"bounded-{weights}-{staleness}",
        weights,
        trainer=trainer,
        streaming={"workers": {"actor.generate": 3}},
    )
    for step in range(1, STEPS + 1):
        assert int(recorded(run, step)["rollout_versions"].values.min()) >= step - 1 - staleness
    assert max(line["staleness/max"] for line in read_metrics(run)) <= staleness
    assert largest_gap(workshop, run) < 1e-5


@pytest.mark.parametrize("weights", ["rolling", pytest.param("interrupt", marks=pytest.mark.soak)])
def test_without_staleness_every_way_gives_what_eager_gives(workshop: Workshop, weights: str) -> None:
    few = merged(EVERY_STEP, {"trainer": {"steps": 3, "rows_per_update": 8}})
    ours = workshop.run(
        f"{weights}-0", runtime="streaming", streaming={"weights": weights, "workers": {"actor.generate": 2}}, **few
    )
    assert_same(trace(ours), trace(workshop.run(f"eager-{weights}", **few)))


@pytest.mark.parametrize(
    ("streaming", "message"),
    [
        ({"weights": "rolling"}, r"write streaming.workers.actor.generate=2, .*streaming.weights="),
        (
            {"weights": "interrupt"},
            r"engines.py:ToTheEnd .*rollout engine: it lacks abort",
        ),
    ],
)
def test_turns_that_no_engine_could_take_are_refused_before_anything_starts(
    workshop: Workshop, streaming: dict[str, Any], message: str
) -> None:
    (workshop.folder / "engines.py").write_text(WITHOUT_ABORT)
    engine = f"{workshop.folder}/engines.py:ToTheEnd" if streaming["weights"] == "interrupt" else "embedded"
    with pytest.raises(UserError, match=message) as caught:
        TrainingRun(workshop.config("refused", runtime="streaming", streaming=streaming, rollout={"engine": engine}))
    assert "\n" not in str(caught.value) and not (workshop.folder / "refused").exists()
