"""A memory budget makes roles take turns, and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console

from braidrl.cli.dry_run import dry_run
from braidrl.errors import UserError
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.memory.residency import GIB, Asset, Residency
from braidrl.runtimes.prepare.checks import without_effect
from braidrl.runtimes.run import TrainingRun
from braidrl.training.memory.offload import storages
from tests.runtimes.spmd.ranks import run_in_ranks
from tests.tiny import Workshop, metrics_without_times, weights_of, write_jsonl

PPO: dict[str, Any] = {
    "flow": "ppo",
    "algorithm": {"kl_coef": 0.1, "reward": "verify"},
    "rollout": {"max_response_tokens": 4, "slots": 16},
    "trainer": {"steps": 3, "prompts_per_step": 2, "checkpoint_every": 1},
    "data": {"max_prompt_tokens": 12},
}
MODEL_BYTES = 4 * 17_000
"""About the size of the tiny Qwen3's weights in float32."""


def with_budget(sections: dict[str, Any], models: float, **trainer: Any) -> dict[str, Any]:
    """Return sections with a budget of this many copies of the weights."""
    return {**sections, "trainer": {**sections["trainer"], **trainer, "resident_gib": models * MODEL_BYTES / GIB}}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, frozenset[Asset], int]]:
    """Record, at each stage, its name, the resident assets and their bytes."""
    seen: list[tuple[str, frozenset[Asset], int]] = []
    before, before_training = Residency.before, Residency.before_training

    def watch(self: Residency, stage: Any) -> None:
        before(self, stage)
        note(self, stage.name)

    def watch_training(self: Residency, role: str) -> None:
        before_training(self, role)
        note(self, f"{role}.update")

    def note(self: Residency, name: str) -> None:
        movables = {asset: held.offloadable for asset, held in self.held.items()}
        size = sum(sum(s.nbytes() for s in storages(m._tensors())) - m.away_bytes for m in movables.values())
        seen.append((name, frozenset(a for a, m in movables.items() if not m.away_bytes), size))

    monkeypatch.setattr(Residency, "before", watch)
    monkeypatch.setattr(Residency, "before_training", watch_training)
    return seen


def test_offloading_roles_keeps_run_bitwise_equal(
    workshop: Workshop, watched: list[tuple[str, frozenset[Asset], int]]
) -> None:
    free = workshop.run("free", **PPO)
    assert not any(size for *_, size in watched), "without a budget there is no residency plan"
    watched.clear()
    tight = with_budget(PPO, 5.5)
    result = workshop.run("tight", **{**tight, "trainer": {**tight["trainer"], "steps": 2}})
    with TrainingRun(workshop.config("tight", **tight), resume=result) as run:
        run.train()
    assert metrics_without_times(result) == metrics_without_times(free)
    for role in ("actor", "critic"):
        expected = weights_of(free, role)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(result, role).items())
    here = {name: assets for name, assets, _ in watched}
    assert Asset("actor", "optimizer") in here["actor.update"] and Asset("critic", "optimizer") in here["critic.update"]
    assert (
        Asset("actor", "optimizer") not in here["critic.update"] and Asset("actor", "engine") in here["actor.generate"]
    )
    assert max(size for *_, size in watched) <= 5.5 * MODEL_BYTES


@pytest.mark.soak
def test_engines_with_weights_of_their_own_come_and_go_too(
    workshop: Workshop, watched: list[tuple[str, frozenset[Asset], int]]
) -> None:
    """Merge adapters into a copy for the engine; the copy is offloaded while the actor trains."""
    trainer = {"steps": 2, "prompts_per_step": 2, "lora": {"rank": 4}}
    sections = {**PPO, "flow": "grpo", "algorithm": {}, "trainer": trainer}
    free = workshop.run("free", **sections)
    watched.clear()
    tight = workshop.run("tight", **with_budget(sections, 2.6))
    assert metrics_without_times(tight) == metrics_without_times(free)
    here = {name: assets for name, assets, _ in watched}
    assert Asset("actor", "engine") in here["actor.generate"]
    assert Asset("actor", "engine") not in here["actor.update"]


@pytest.mark.soak
def test_an_engine_of_evaluations_alone_comes_and_goes_too(
    workshop: Workshop, watched: list[tuple[str, frozenset[Asset], int]]
) -> None:
    records = [{"prompt": f"{n}+1=", "response": str(n + 1), "answer": str(n + 1)} for n in range(9)]
    data = {**PPO["data"], "train": str(write_jsonl(workshop.folder / "given.jsonl", records))}
    sections = {
        "flow": "sft",
        "rollout": {**PPO["rollout"], "samples_per_prompt": 1},
        "evaluation": {"every": 1, "samples": 1},
        "data": {**data, "eval": {"held_out": str(workshop.data)}},
        "trainer": {"steps": 2, "prompts_per_step": 2, "lora": {"rank": 4}},
    }
    free = workshop.run("free", **sections)
    watched.clear()
    tight = workshop.run("tight", **with_budget(sections, 2.6))
    assert metrics_without_times(tight) == metrics_without_times(free)
    here = {name: assets for name, assets, _ in watched}
    assert Asset("actor", "engine") in here["evaluation.generate"]
    assert Asset("actor", "engine") not in here["actor.update"]


def test_ranks_that_shard_a_model_offload_their_parts(workshop: Workshop) -> None:
    sections = {**PPO, "trainer": {**PPO["trainer"], "layout": {"shard": "full"}, "steps": 2}}
    more = {"runtime": "distributed", "workers": 2}
    tight = with_budget(sections, 3.5)
    run_in_ranks([workshop.tree("free", **sections, **more), workshop.tree("tight", **tight, **more)], 2)
    assert metrics_without_times(workshop.folder / "tight") == metrics_without_times(workshop.folder / "free")


def test_checkpoint_during_stage_keeps_its_assets_loaded(workshop: Workshop) -> None:
    """The situation is that of runtime=hybrid, where an interrupt saves during generation."""
    with TrainingRun(workshop.config(**with_budget(PPO, 5.5))) as run:
        executor: StageExecutor = run.backend.executor
        generate = run.flow.stages[0]
        executor.residency.before(generate)
        needed = {Asset("actor", "engine"), Asset("actor", "weights")}
        seen: list[frozenset[Asset]] = []
        for role, worker in executor.workers.items():
            export: Callable[..., None] = worker.export

            def watched(folder: Any, write: bool, export: Any = export, role: str = role) -> None:
                seen.append(frozenset(executor.residency.resident))
                assert needed | {Asset(role, "weights"), Asset(role, "optimizer")} <= executor.residency.resident
                export(folder, write)

            worker.export = watched  # type: ignore[method-assign]
        executor.save(workshop.folder / "saved")
        assert len(seen) == 2 and needed <= executor.residency.resident


def test_a_budget_that_no_stage_fits_is_refused_also_dry(workshop: Workshop) -> None:
    for start in (TrainingRun, dry_run):
        with pytest.raises(UserError, match=r"needs .*bytes on a device") as caught:
            start(workshop.config(**with_budget(PPO, 0.5), output=str(workshop.folder / "refused")))
        assert "\n" not in str(caught.value)


def test_dry_run_reports_moves_and_lower_peak(workshop: Workshop) -> None:
    shown, tight = StringIO(), StringIO()
    dry_run(workshop.config(**PPO), Console(file=shown, width=160))
    dry_run(workshop.config(**with_budget(PPO, 5.5)), Console(file=tight, width=160))
    assert "waits in host memory" not in shown.getvalue()
    (line,) = [line for line in tight.getvalue().splitlines() if "waits in host memory" in line]
    assert "critic optimizer" in line
    peaks = [next(line for line in text.getvalue().splitlines() if "at its peak" in line) for text in (shown, tight)]
    assert float(peaks[1].split()[-3]) < float(peaks[0].split()[-3])


def test_streaming_reports_that_a_memory_budget_has_no_effect(workshop: Workshop) -> None:
    (line,) = without_effect(workshop.config(**with_budget(PPO, 1.0), runtime="streaming"))
    assert line.startswith("trainer.resident_gib has no effect")
