"""Every part of `make gpu` runs on a CPU at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import Record, run
from benchmarks.gpu.checks import CHECKS, lacking
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.tables import TABLES


@pytest.mark.soak
def test_the_cpu_twin_of_make_gpu_runs_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(tmp_path / "cpu.json", {"device": "cpu", "size": "tiny", "torch": "", "transformers": ""})
    run(record, "cpu", "tiny", tmp_path)
    shapes = [shape.name for shape in SHAPES["tiny"]]
    parts = [name for name, (_, packages) in CHECKS.items() if not lacking(packages)]
    parts += ["linear attention", "rates", *(f"{table}, {shape}" for shape in shapes for table in (*TABLES, "engines"))]
    content = json.loads((tmp_path / "cpu.json").read_text())["parts"]
    assert list(content) == parts and not record.failed
    assert {part["status"] for part in content.values()} == {"ok"}
    (step,) = content["GRPO step, tiny"]["found"]
    assert step["seconds"] > 0 and "| GRPO step, tiny: model |" in (tmp_path / "cpu.md").read_text()
    output = capsys.readouterr().out
    assert all(f"{name}: ok" in output for name in parts), "each part prints as it ends"
