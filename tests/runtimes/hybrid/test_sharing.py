"""No data passes through a single rank: each generating rank reads, evaluates, records and keeps its own rows."""

from __future__ import annotations

import json

import pytest

from braidrl.observe.metrics import Sums
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import rollout_path
from braidrl.runtimes.row_store import Admission, Surplus
from tests.invariants.traces import assert_same, trace
from tests.runtimes.hybrid.backends import hybrid_crew
from tests.runtimes.hybrid.warm import WarmCluster
from tests.tiny import Workshop, metrics_without_times

SECTIONS = {
    "flow": "grpo",
    "dtype": "float64",
    "evaluation": {"every": 1, "samples": 2, "max_prompts": 5, "before_first_step": False},
    "trainer": {"steps": 1, "prompts_per_step": 4, "learning_rate": 3e-3},
}


@pytest.mark.soak
def test_ranks_record_own_rows_and_replay_reads_them(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    sections = {**SECTIONS, "data": {"train": str(workshop.data), "eval": {"held_out": str(workshop.data)}}}
    hybrid = {"runtime": "hybrid", "workers": 3, "placement": "colocate"}
    run, alone = workshop.run("together", **sections, **hybrid), workshop.run("alone", **sections)
    assert_same(trace(run), trace(alone))
    assert metrics_without_times(run)[0] == metrics_without_times(alone)[0]
    for path in (rollout_path, lambda run, step: rollout_path(run, step, "held_out")):
        files = sorted(path(run, 1).iterdir())
        assert [file.name for file in files] == ["00000.parquet", "00001.parquet", "00002.parquet"]
        assert all(len(read_rollouts(file)) for file in files) and path(alone, 1).is_file()
        assert read_rollouts(path(run, 1)).ordered().uids() == read_rollouts(path(alone, 1)).ordered().uids()
    again = workshop.run("again", replay=run, **sections, **hybrid)
    assert_same(trace(again), trace(workshop.run("again alone", replay=run, **sections)))


def test_surplus_is_written_and_read_by_all_ranks(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    path = workshop.folder / "surplus-0.rows"
    config = workshop.config(**SECTIONS, runtime="hybrid", workers=2, placement="colocate")
    with hybrid_crew(config, warm_cluster) as backend:
        table = backend.run(backend.workers.prepared.flow.stages[0], backend.read(Admission(range(5))), 1, Sums())
        index = backend.index(table)
        backend.save_rows(path, table)
        assert [file.name for file in sorted(path.iterdir())] == ["00000", "00001"]
        read = backend.read(Surplus(path))
        assert read.outputs[0].worker.unique().tolist() == [0, 1]
        assert backend.index(read).ordered().uids() == index.ordered().uids()


def test_ranks_tokenize_own_share_and_draw_same_prompts(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    long = workshop.folder / "long.jsonl"
    lines = [{"prompt": "1" * (n % 5 + 1) + "+2=", "answer": "3"} for n in range(17)]
    long.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sections = {**SECTIONS, "evaluation": {"every": 0}, "data": {"train": str(long), "max_prompt_tokens": 6}}
    run = workshop.run("together", **sections, runtime="hybrid", workers=3, placement="colocate")
    assert_same(trace(run), trace(workshop.run("alone", **sections)))
