"""A vision tower in a role's worker: its learning rate, and its adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from braidrl.training.backends import BackendSpec
from braidrl.training.roles.worker import RoleWorker
from tests.tiny import ROOT, load_module
from tests.training.parallel.laid_out import config_of, make_rows, one_step

shapes = load_module(ROOT / "examples" / "vision" / "shapes.py")


def test_the_tower_has_adapters_and_a_learning_rate_of_its_own(tmp_path: Path) -> None:
    model = str(shapes.write_model(tmp_path / "model", 0))
    tower, text = "weight model.visual.blocks.0.attn.qkv.weight", "weight model.language_model.norm.weight"
    settings: list[dict[str, Any]] = [
        {"train_vision": True, "vision_learning_rate": 1e-9},
        {"lora": {"rank": 2, "vision_targets": ["qkv", "proj"]}, "learning_rate": 1e-2},
    ]
    changed = []
    for trainer in settings:
        config = config_of(model, max_tokens_per_device=96, **{"learning_rate": 1e-3, **trainer})
        worker = RoleWorker(BackendSpec("actor", config, train=True))
        before = {name: tensor.clone() for name, tensor in worker.full_state_dict().items()}
        values = one_step(worker, torch.arange(len(make_rows())))
        changed.append([float((values[f] - before[f.removeprefix("weight ")]).abs().max()) for f in (tower, text)])
    (slow, fast), (adapted, kept) = changed
    assert 0 < slow < 1e-8 and fast > 1e-4
    assert adapted > 1e-5 and kept == 0
