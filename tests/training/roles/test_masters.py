"""Master weights of a model trained in bfloat16 start as precise as the file that it was loaded from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import World
from braidrl.training.backends import BackendSpec
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.roles.checkpoint import divided_state
from braidrl.training.roles.worker import RoleWorker
from braidrl.weights.checkpoint_files import WeightFiles
from braidrl.weights.shards import full_tensor
from tests.training.parallel.laid_out import config_of

LAYOUTS = ({"shard": "full"}, {"tensor": 2}, {"pipeline": 2})


def distances(worker: RoleWorker) -> list[float]:
    """Return the largest difference of each master from the file, and the file's largest distance from bfloat16."""
    assert worker.optimizer is not None
    files, names = WeightFiles(worker.path), list(worker.shapes)
    masters = {
        name: full_tensor(tensor)
        for name, tensor in divided_state(worker.optimizer).items()
        if name.endswith(".master")
    }
    expected = {name: files[names[int(name.split(".")[0])]] for name in masters}
    rounded = max(float((tensor - tensor.bfloat16().float()).abs().max()) for tensor in expected.values())
    return [max(float((masters[name] - expected[name]).abs().max()) for name in masters), rounded]


def of_layouts(world: World, task: dict[str, Any]) -> list[list[float]]:
    configs = [config_of(task["model"], dtype="bfloat16", layout=layout) for layout in LAYOUTS]
    return [
        distances(RoleWorker(BackendSpec("actor", config, True, DataParallel(world.group, world))))
        for config in configs
    ]


def test_masters_of_a_whole_model_are_the_files_weights(tiny_models: dict[str, Path]) -> None:
    worker = RoleWorker(BackendSpec("actor", config_of(str(tiny_models["qwen3"]), dtype="bfloat16"), True))
    off, rounded = distances(worker)
    assert off == 0 and rounded > 1e-5
    assert all(p.dtype == torch.bfloat16 for p in worker.model.parameters())


def test_masters_of_a_sharded_model_are_the_files_weights_too(tiny_models: dict[str, Path]) -> None:
    of_ranks = run_ranks("tests.training.roles.test_masters:of_layouts", {"model": str(tiny_models["qwen3"])}, 2, 120.0)
    assert [off for off, _ in of_ranks] == [0, 0, 0]


@pytest.mark.parametrize(("saved", "resumed"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_masters_keep_their_precision_if_a_run_resumes_in_another_dtype(
    tiny_models: dict[str, Path], tmp_path: Path, saved: str, resumed: str
) -> None:
    # As with dtype=auto, if a run begins on a CPU and goes on on CUDA, or the other way round.
    model = str(tiny_models["qwen3"])
    before, after = (
        RoleWorker(BackendSpec("actor", config_of(model, dtype=dtype), True)) for dtype in (saved, resumed)
    )
    assert before.optimizer is not None and after.optimizer is not None
    with torch.no_grad():
        for master in before.optimizer.masters:
            master.add_(torch.randn(master.shape), alpha=1e-5)
    before.optimizer._publish()
    (tmp_path / "actor").mkdir()
    before.export(tmp_path / "actor")
    after.load(tmp_path / "actor")
    for ours, theirs, parameter in zip(
        after.optimizer.masters, before.optimizer.masters, after.optimizer.parameters, strict=True
    ):
        assert torch.equal(ours, theirs) and torch.equal(parameter, ours.to(parameter.dtype))
