"""The streaming runtime with real processes: the same result as eager, whatever the workers, and nothing left
behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.algorithms.shaping import next_kl_coefficient
from braidrl.cluster.shared_memory import PREFIX, shared_folder
from braidrl.errors import UserError, WorkerError
from braidrl.observe.metrics import read_metrics
from braidrl.observe.trace import read_trace
from braidrl.queue.owner import remove_abandoned
from braidrl.queue.table import Lease
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import latest_checkpoint, read_state, run_config
from braidrl.runtimes.streaming.orders import StreamingBackend
from tests.invariants.traces import assert_usage_is_told
from tests.leftovers import family, listening
from tests.runtimes.turns import PLAYED
from tests.tiny import (
    Workshop,
    braid,
    metrics_without_times,
    recorded,
    sums,
    wait_for_steps,
    weights_of,
    write_jsonl,
    write_model,
)

DIAMOND, TWO_ACTORS = (str(Path(__file__).parents[1] / name) for name in ("diamond.yaml", "two_actors.yaml"))
LONGEST_FIRST = f"{Path(__file__).parents[3]}/examples/longest_first.py:longest_first"
"""A user's own sampler, in a file outside the package."""
MANY = 2000
"""More changes than a run of a few steps has, and fewer than a program makes in two seconds that looks without a pause.
"""
TWO_EACH = {"actor.generate": 2, "actor": 2}
FLOWS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"kl_coef": 0.1}, "trainer": {"rows_per_update": 8, "epochs": 2}},
    "dapo": {
        "flow": "dapo",
        "algorithm": {"overlong_cache": 4, "overlong_filter": True},
        "trainer": {"rows_per_update": 8},
    },
    "over-sampled": {
        "flow": "dapo",
        "algorithm": {"overlong_cache": 4},
        "trainer": {"rows_per_update": 8, "over_sampling": 3.0},
    },
    "prompt-mean": {"flow": "dapo", "algorithm": {"aggregate": "prompt-mean"}, "trainer": {"rows_per_update": 4}},
    "diamond": {"flow": DIAMOND, "trainer": {"rows_per_update": 8}},
    "two actors": {"flow": TWO_ACTORS, "trainer": {"rows_per_update": 8}},
    "ppo": {
        "flow": "ppo",
        "algorithm": {"reward": "verify", "kl_target": 1.0},
        "trainer": {"rows_per_update": 8},
    },
    "played": {
        "rollout": {"max_response_tokens": 4, "environment": {"name": PLAYED, "params": {"fails": 2}}},
        "trainer": {"rows_per_update": 8},
    },
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("streaming")
    model = write_model(folder / "model", "qwen2")
    return Workshop(folder, model, write_jsonl(folder / "train.jsonl", sums(24)))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails a test after which a port or memory is left of a run that has ended; other runs on this machine are
    let be.
    """
    remove_abandoned()
    before, sockets = without_owner(), listening(family())
    yield
    assert listening(family()) <= sockets
    opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.startswith(f"{shared_folder()}/{PREFIX}")]
    assert remove_abandoned() == []
    assert without_owner() <= before


def without_owner() -> set[str]:
    names = {path.name for path in shared_folder().glob(f"{PREFIX}*")}
    return {name for name in names if f"{PREFIX}{name.split('-')[1].removesuffix('.owner')}.owner" not in names}


def sections_of(flow: str, steps: int = 5, **more: Any) -> dict[str, Any]:
    known = FLOWS[flow]
    trainer = {"steps": steps, "max_tokens_per_device": 64, **known.get("trainer", {}), **more.pop("trainer", {})}
    return {**known, "dtype": "float64", "trainer": trainer, **more}


def stream(workshop: Workshop, name: str, flow: str, streaming: dict[str, Any] | None = None, **more: Any) -> Path:
    return workshop.run(name, runtime="streaming", streaming=streaming or {}, **sections_of(flow, **more))


def assert_same(eager: Path, other: Path, metrics: bool = True) -> None:
    """Tokens identical; advantages, every metric (gradient norms among them) and weights to 1e-7."""
    lines = metrics_without_times(eager), metrics_without_times(other)
    assert len(lines[0]) == len(lines[1])
    for ours, theirs in zip(*lines, strict=True) if metrics else ():
        names = [n for n in ours if ours[n] is not None]
        assert {n: theirs[n] for n in names} == pytest.approx({n: ours[n] for n in names}, abs=1e-7)
        assert {n: theirs.get(n) for n in ours if "dropped" in n} == {n: ours[n] for n in ours if "dropped" in n}
    for step in [line["step"] for line in lines[0] if line["step"]]:
        ours, theirs = recorded(eager, step), recorded(other, step)
        assert ours.uids() == theirs.uids()
        assert torch.equal(ours["tokens"].values, theirs["tokens"].values)
        for name in ("advantage", "reward"):
            if name in ours:
                assert torch.allclose(ours[name].double(), theirs[name].double(), rtol=0, atol=1e-7)
        for name in ("rollout_log_probs", "advantages"):
            if name in ours:
                assert torch.allclose(ours[name].values, theirs[name].values, rtol=0, atol=1e-7)
    ours, theirs = weights_of(eager), weights_of(other)
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=0, atol=1e-7), name


@pytest.fixture(scope="module")
def eager(workshop: Workshop) -> Callable[..., Path]:
    """The same run in one process, made once."""
    made: dict[str, Path] = {}

    def run(flow: str, steps: int = 5) -> Path:
        name = f"eager-{flow}-{steps}"
        if name not in made:
            made[name] = workshop.run(name, **sections_of(flow, steps))
        return made[name]

    return run


@pytest.mark.soak
@pytest.mark.parametrize(
    ("flow", "streaming"),
    [
        ("dapo", {"workers": TWO_EACH, "dispatch_rows": 3, "sampler": "token_balanced"}),
        pytest.param("over-sampled", {"workers": {"actor.generate": 2}, "dispatch_rows": 4}, marks=pytest.mark.soak),
        pytest.param(
            "prompt-mean",
            {"workers": {"actor": 2}, "sampler": {"actor.update": "whole_groups"}},
            marks=pytest.mark.soak,
        ),
        pytest.param("diamond", {"dispatch_rows": 1, "sampler": LONGEST_FIRST}, marks=pytest.mark.soak),
        ("played", {"workers": {"actor.generate": 2}, "dispatch_rows": 3}),
    ],
)
def test_without_staleness_streaming_gives_what_eager_gives(
    workshop: Workshop, eager: Callable[..., Path], flow: str, streaming: dict[str, Any]
) -> None:
    streamed = stream(workshop, f"streaming-{flow}", flow, streaming, steps=3)
    assert_same(eager(flow, 3), streamed)
    assert_usage_is_told(read_metrics(streamed))


@pytest.mark.soak
@pytest.mark.parametrize("weights", ["end", "delayed"])
@pytest.mark.parametrize("dispatch_rows", [1, 5, 64])
@pytest.mark.parametrize("workers", [{}, TWO_EACH, {"actor.generate": 3, "actor": 4}])
@pytest.mark.parametrize("flow", list(FLOWS))
def test_the_same_result_under_every_setting_that_must_not_matter(
    workshop: Workshop, eager: Callable[..., Path], flow: str, workers: dict[str, int], dispatch_rows: int, weights: str
) -> None:
    name = f"soak-{flow}-{len(workers)}-{workers.get('actor', 1)}-{dispatch_rows}-{weights}"
    settings = {"workers": workers, "dispatch_rows": dispatch_rows, "weights": weights}
    assert_same(eager(flow), stream(workshop, name, flow, settings))


@pytest.mark.soak
def test_main_program_carries_no_payload_and_refuses_to(workshop: Workshop) -> None:
    with in_process(workshop, "no-payload", **sections_of("dapo", steps=2, trainer={"checkpoint_every": 1})) as run:
        run.train()
        assert isinstance(run.backend, StreamingBackend)
        data = run.backend.control.data
        with pytest.raises(RuntimeError, match="carries no payload"):
            data.write([b"payload"])
    assert all(line["streaming/main_payload_bytes"] == 0 for line in read_metrics(run.folder))
    assert recorded(run.folder, 2)["tokens"].values.numel() > 0


@pytest.mark.soak
def test_payload_on_a_disk_gives_the_same_result(
    workshop: Workshop, eager: Callable[..., Path], tmp_path: Path
) -> None:
    assert_same(eager("grpo", 3), stream(workshop, "streaming-file", "grpo", {"storage": f"file:{tmp_path}"}, steps=3))
    assert list(tmp_path.iterdir()) == []


def test_payload_in_redis_gives_the_same_result(
    workshop: Workshop, eager: Callable[..., Path], redis_server: str
) -> None:
    assert_same(eager("grpo", 3), stream(workshop, "streaming-redis", "grpo", {"storage": redis_server}, steps=3))


@pytest.mark.soak
def test_text_of_a_second_source_is_streamed_with_its_rows(workshop: Workshop) -> None:
    texts = write_jsonl(workshop.folder / "texts.jsonl", [{"prompt": f"{i}+{i}={2 * i}"} for i in range(5)])
    sections = {
        "flow": "ppo_ptx",
        "algorithm": {"reward": "verify", "ptx_coef": 0.5},
        "data": {"ptx": str(texts)},
        "dtype": "float64",
        "trainer": {"steps": 2, "rows_per_update": 8},
    }
    streamed = workshop.run("ptx-streaming", runtime="streaming", streaming={"dispatch_rows": 5}, **sections)
    assert_same(workshop.run("ptx-eager", **sections), streamed)


def test_dynamic_sampling_has_refilled_in_these_runs(eager: Callable[..., Path]) -> None:
    dropped = [n for line in read_metrics(eager("dapo")) for n in line if n.startswith("groups/dropped/all")]
    assert dropped


@pytest.mark.parametrize(("weights", "share"), [("end", 0.5), pytest.param("delayed", 0.0, marks=pytest.mark.soak)])
def test_staleness_one_is_kept_and_rows_train_once(workshop: Workshop, weights: str, share: float) -> None:
    streaming = {"weights": weights, "workers": {"actor.generate": 2}, "on_policy_share": share}
    run = stream(workshop, f"stale-{weights}", "dapo", streaming, trainer={"max_staleness": 1, "rows_per_update": 8})
    lines = read_metrics(run)
    assert all(line["staleness/on_policy_share"] >= share for line in lines)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert max(line["staleness/max"] for line in lines) == 1
    uids = [uid for step in range(1, 6) for uid in recorded(run, step).uids()]
    assert len(uids) == len(set(uids)) == 5 * 16
    for step in range(1, 6):
        assert int(recorded(run, step)["version"].min()) >= step - 2


@pytest.mark.soak
def test_a_stages_state_follows_each_batch_in_turn_also_with_staleness(workshop: Workshop) -> None:
    run = stream(workshop, "stale-state", "ppo", {"dispatch_rows": 4}, trainer={"max_staleness": 1})
    coefficients = [line["shape.adaptive_kl_penalty/coef"] for line in read_metrics(run)]
    expected = [0.05]
    for step in range(1, 5):
        rows = recorded(run, step)
        kl = float((rows["old_log_probs"].values - rows["ref_log_probs"].values).double().sum()) / len(rows)
        expected.append(next_kl_coefficient({"coef": expected[-1]}, {"kl": kl, "rows": 1.0}, target=1.0)["coef"])
    assert coefficients == pytest.approx(expected, rel=1e-6)
    assert len(set(coefficients)) == 5


def test_surplus_that_is_kept_is_trained_in_the_next_iteration(workshop: Workshop) -> None:
    run = stream(
        workshop,
        "surplus",
        "dapo",
        trainer={"max_staleness": 1, "surplus": "keep", "prompts_per_step": 2, "rows_per_update": 8},
    )
    uids = [uid for step in range(1, 6) for uid in recorded(run, step).uids()]
    assert len(uids) == len(set(uids)) == 5 * 8


def in_process(workshop: Workshop, name: str, **sections: Any) -> TrainingRun:
    return TrainingRun(workshop.config(name, runtime="streaming", **sections))


def kill_when_it_holds_rows(
    program: StreamingBackend,
    group: str,
    killed: list[int],
    sent: int = signal.SIGKILL,
    chosen: Callable[[Lease], bool] = lambda lease: True,
) -> None:
    """Kills a worker at a moment when it has rows, of a lease that is chosen, that it has not given back."""
    while not killed:
        with program.control.changed:
            for member in program.processes.members:
                held = program.stream.schedule.tasks.leases.held.values()
                own = (lease for lease in held if lease.holder == member.holder)
                if member.group.name == group and any(map(chosen, own)):
                    pid = member.process.pid
                    os.kill(pid, sent)
                    killed.append(pid)
                    break
        time.sleep(0.001)


def is_saved(run: TrainingRun, lease: Lease) -> bool:
    """Return True if a lease comes while the newest checkpoint has the last published version."""
    assert isinstance(run.backend, StreamingBackend)
    step = run.backend.stream.schedule.progress.published
    return latest_checkpoint(run.folder) == run.folder / "checkpoints" / f"step-{step}"


@pytest.mark.soak
def test_killed_workers_and_trainer_lose_no_row_or_step(workshop: Workshop, eager: Callable[..., Path]) -> None:
    """The trainer dies while the last checkpoint is of the last published version: then rows in the queue are kept."""
    killed: dict[str, list[int]] = {group: [] for group in ("actor.generate", "reference", "actor")}
    with in_process(
        workshop, "killed", **sections_of("grpo", trainer={"checkpoint_every": 1, "max_restarts": 1})
    ) as run:
        backend = run.backend
        assert isinstance(backend, StreamingBackend)

        def kill_one_of_each() -> None:
            makes_rows = next(member for member in backend.processes.members if member.group.name == "rows")
            os.kill(makes_rows.process.pid, signal.SIGKILL)
            for group, pids in killed.items():
                held = partial(is_saved, run) if group == "actor" else lambda lease: True
                kill_when_it_holds_rows(backend, group, pids, chosen=held)

        killer = threading.Timer(0.0, kill_one_of_each)
        killer.start()
        run.train()
        killer.join()
        assert {m.group.name: m.starts for m in backend.processes.members} == dict.fromkeys([*killed, "rows"], 1)
    assert all(len(pids) == 1 for pids in killed.values()) and not run.repairs.spend()
    assert all(line["streaming/rows_drawn_again"] == 0 for line in read_metrics(run.folder))
    assert_same(eager("grpo"), run.folder)


def test_a_worker_that_hangs_is_replaced(workshop: Workshop, eager: Callable[..., Path]) -> None:
    stopped: list[int] = []
    with in_process(workshop, "hung", streaming={"lease_s": 2.0, "wait_s": 0.5}, **sections_of("dapo")) as run:
        assert isinstance(run.backend, StreamingBackend)
        killer = threading.Timer(0.0, kill_when_it_holds_rows, (run.backend, "actor.generate", stopped, signal.SIGSTOP))
        killer.start()
        run.train()
        killer.join()
        # The main process, which waits for a batch meanwhile, must not wake all waiting threads continuously.
        assert run.backend.control.changes < MANY
        assert [m.starts for m in run.backend.processes.members if m.group.name == "actor.generate"] == [1]
    assert_same(eager("dapo"), run.folder)


@pytest.mark.soak
def test_run_resumed_after_trainer_death_equals_undisturbed_run(workshop: Workshop, eager: Callable[..., Path]) -> None:
    killed: list[int] = []
    with in_process(workshop, "killed-trainer", **sections_of("ppo", trainer={"checkpoint_every": 1})) as run:
        assert isinstance(run.backend, StreamingBackend) and run.config.trainer.max_restarts == 0
        killer = threading.Timer(
            0.0, kill_when_it_holds_rows, (run.backend, "actor", killed), {"chosen": partial(is_saved, run)}
        )
        killer.start()
        with pytest.raises(WorkerError, match=r"^actor 0,.* is gone \(.*signal 9\).*$") as caught:
            run.train()
        killer.join()
    assert "\n" not in str(caught.value) and 1 <= len(read_metrics(run.folder)) < 5
    with TrainingRun(run_config(run.folder), resume=run.folder) as again:
        again.train()
    assert_same(eager("ppo"), run.folder)


def faulty(workshop: Workshop) -> dict[str, Any]:
    """A flow with a stage that raises."""
    (workshop.folder / "faulty.py").write_text(
        "from braidrl.algorithms.registry import shapes\n\n\n"
        "@shapes.register(writes=['reward'])\n"
        "def faulty(reward, *, factor=1.0):\n    '''Raise.'''\n"
        "    faulty.__module__ = 'braidrl.faulty'  # in the worker alone: a defect of Braid ends with its traceback\n"
        "    raise RuntimeError('the shape of water')\n"
    )
    (workshop.folder / "faulty-flow.yaml").write_text(
        "flow: faulty\nstages:\n- {type: generate, role: actor}\n- {type: verify, role: reward}\n"
        "- {type: 'faulty.py:faulty'}\n- {type: advantage.group_normalized}\n"
        "- {type: update, role: actor, params: {loss: {name: clip}}}\n"
    )
    return {"flow": str(workshop.folder / "faulty-flow.yaml"), "dtype": "float64"}


def test_an_exception_in_a_worker_ends_the_run_with_its_traceback(workshop: Workshop) -> None:
    with in_process(workshop, "faulty", **faulty(workshop)) as run, pytest.raises(WorkerError) as caught:
        run.train()
    for part in ("actor-0", "the shape of water", "stage faulty", "rows (0, "):
        assert part in str(caught.value)
    assert isinstance(run.backend, StreamingBackend) and run.backend.processes.members == []


def test_empty_epoch_raises_same_error_as_eager(workshop: Workshop) -> None:
    verify = {"verify": [{"name": f"{workshop.folder}/verifiers.py:always_wrong"}]}
    with (
        in_process(workshop, "consecutive_dropped", **sections_of("dapo"), reward=verify) as run,
        pytest.raises(UserError, match=r"24 groups.*all wrong: 24;.*score was -1"),
    ):
        run.train()


@pytest.mark.soak
def test_run_resumes_in_one_process(workshop: Workshop, eager: Callable[..., Path]) -> None:
    first = stream(workshop, "resumed", "ppo", steps=2)
    config = run_config(first)
    trainer = config.trainer.model_copy(update={"steps": 5})
    with TrainingRun(config.model_copy(update={"trainer": trainer, "runtime": "eager"}), resume=first) as run:
        run.train()
    assert_same(eager("ppo"), first)


@pytest.mark.soak
def test_eager_run_resumes_under_streaming(workshop: Workshop, eager: Callable[..., Path]) -> None:
    first = workshop.run("started-eager", **sections_of("dapo", 2))
    config = run_config(first)
    trainer = config.trainer.model_copy(update={"steps": 5})
    with TrainingRun(config.model_copy(update={"trainer": trainer, "runtime": "streaming"}), resume=first) as run:
        run.train()
    assert_same(eager("dapo"), first)


@pytest.mark.parametrize(
    ("flow", "stale"),
    [
        ("dapo", {"max_staleness": 1, "surplus": "keep", "prompts_per_step": 2}),
        pytest.param("dapo", {"max_staleness": 1, "rows_per_update": 8}, marks=pytest.mark.soak),
        pytest.param("grpo", {"max_staleness": 2}, marks=pytest.mark.soak),
        pytest.param("ppo", {"max_staleness": 1}, marks=pytest.mark.soak),
    ],
)
def test_stale_run_resumes_with_rows_started_on_older_versions(
    workshop: Workshop, flow: str, stale: dict[str, Any]
) -> None:
    name = f"started-{flow}-{'-'.join(map(str, stale.values()))}"
    settings = {"checkpoint_every": 2, "keep_checkpoints": 9, **stale}
    quiet = stream(workshop, f"{name}-quiet", flow, trainer=settings)
    again = workshop.folder / name
    shutil.copytree(quiet, again)
    (again / "checkpoints" / "latest").write_text("step-2\n")
    started = read_state(again / "checkpoints" / "step-2")["started"]
    assert [batch["iteration"] for batch in started] == list(range(3, 3 + stale["max_staleness"]))
    with TrainingRun(run_config(again), resume=again) as run:
        run.train()
    assert_same(quiet, again)
    uids = [uid for step in range(1, 6) for uid in recorded(again, step).uids()]
    assert len(uids) == len(set(uids)) == 5 * len(recorded(again, 1))
    assert max(line["staleness/max"] for line in read_metrics(again)) == stale["max_staleness"]


@pytest.mark.soak
def test_evaluation_is_the_same_as_in_one_process(workshop: Workshop) -> None:
    held_out = write_jsonl(workshop.folder / "held_out.jsonl", sums(5, seed=1))
    sections = {
        **sections_of("grpo", 3),
        "data": {"eval": {"held_out": str(held_out)}},
        "evaluation": {"every": 2, "samples": 2, "before_first_step": True},
    }
    ours = workshop.run("evaluated-eager", **sections)
    theirs = workshop.run("evaluated-streaming", runtime="streaming", **sections)
    assert_same(ours, theirs, metrics=False)
    for line, other in zip(metrics_without_times(ours), metrics_without_times(theirs), strict=True):
        assert {n: other[n] for n in line if n.startswith("eval/")} == {
            n: v for n, v in line.items() if n.startswith("eval/")
        }
    # Before the first step, and after the second and the third, 5 prompts with 2 samples.
    spans = [span for span in read_trace(theirs) if span.state == "busy"]
    rows = {
        stage: sum(span.rows for span in spans if span.stage == stage)
        for stage in ("evaluation.generate", "actor.generate")
    }
    assert rows == {"evaluation.generate": 30, "actor.generate": 48}


def wait_until_gone(pids: list[int], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"processes {alive} are still there"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("sent", "status"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak), (signal.SIGKILL, -9)]
)
def test_interrupted_or_killed_run_leaves_nothing_behind(workshop: Workshop, sent: signal.Signals, status: int) -> None:
    name = f"ended-by-{sent.name}"
    path = workshop.config_file(name, runtime="streaming", **sections_of("grpo", 1000))
    process = braid("train", path)
    wait_for_steps(workshop.folder / name, 2, process)
    workers = family(process.pid)[1:]
    sockets = listening([process.pid, *workers])
    assert len(workers) >= 4 and sockets
    process.send_signal(sent)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    wait_until_gone(workers)
    assert not sockets & listening()
    if sent is signal.SIGINT:
        steps = len(read_metrics(workshop.folder / name))
        assert (workshop.folder / name / "checkpoints" / "latest").read_text() == f"step-{steps}\n"
        assert (workshop.folder / name / "report.html").is_file()


@pytest.mark.soak
def test_every_worker_writes_a_trace(workshop: Workshop) -> None:
    run = stream(workshop, "traced", "grpo", {"workers": {"actor.generate": 2}, "dispatch_rows": 4}, steps=3)
    spans = read_trace(run)
    busy = [span for span in spans if span.state == "busy"]
    assert {span.worker for span in busy} >= {"actor.generate-0", "reference-0", "actor-0"}
    for stage in ("actor.generate", "reward.verify", "reference.log_probs"):
        assert sum(span.rows for span in busy if span.stage == stage) == 3 * 16
    assert sum(span.rows for span in busy if span.stage == "actor.update") == 3 * 16 * 2
    trained = sum(line["tokens/trained"] for line in read_metrics(run))
    tokens = {
        stage: sum(span.tokens for span in busy if span.stage == stage) for stage in ("actor.generate", "actor.update")
    }
    assert tokens == {"actor.generate": trained, "actor.update": 2 * trained}
    assert any(span.state == "waiting" for span in spans)
    assert {span.version for span in busy if span.stage == "actor.generate"} == {0, 1, 2}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"flow": "sft", "rollout": {"samples_per_prompt": 1}}, "flow sft generates none"),
        ({"streaming": {"workers": {"actr": 2}}}, "no worker group 'actr'"),
        ({"streaming": {"workers": {"actor": {"kind": "H100-80GB"}}}}, "write cluster.launcher=ray"),
        (
            {
                "streaming": {"workers": {"actor": {"generate": {"workers": 3, "nodes": 2}}}},
                "cluster": {"launcher": "ray"},
            },
            r"actor.generate .*3 workers, .*nodes=2",
        ),
        ({"trainer": {"surplus": "keep"}}, "trainer.max_staleness=0 forbids"),
        (
            {"streaming": {"on_policy_share": 0.5}},
            "with trainer.max_staleness=0 there are none; write trainer.max_staleness=1",
        ),
        (
            {"streaming": {"on_policy_share": 0.5}, "trainer": {"max_staleness": 1, "surplus": "keep"}},
            "trainer.surplus=keep adds others; write trainer.surplus=drop",
        ),
        (
            {"streaming": {"on_policy_share": 0.9}, "trainer": {"max_staleness": 1}},
            r"4 prompts .*; write trainer.max_staleness=0",
        ),
        ({"cluster": {"launcher": "torchrun"}}, "write cluster.launcher=local or cluster.launcher=ray"),
    ],
)
def test_what_cannot_stream_is_refused_before_anything_starts(
    workshop: Workshop, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        TrainingRun(workshop.config("refused", **{"runtime": "streaming", **sections}))
    assert "\n" not in str(caught.value)
    assert not (workshop.folder / "refused").exists()


def test_recording_and_replaying_are_refused(workshop: Workshop) -> None:
    with pytest.raises(UserError, match="write runtime=eager"):
        TrainingRun(workshop.config("refused", runtime="streaming"), rollout_only=True)
