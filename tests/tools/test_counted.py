"""The benchmark of a weight update counts every byte that torch or the operating system copies, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UPDATES = """
import torch
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.weights.file import stored_weights
from braidrl.weights.publisher import ModelWeights
from tests.engines.tiny import make_model, make_tokenizer

engine = EmbeddedEngine(make_model(), make_tokenizer(), Decoding(2, 32))
other = ModelWeights(make_model())
file = stored_weights(other.tensors())
engine.publish(1, file)
engine.publish(2, other)
print(file.path.stat().st_size, sum(parameter.nbytes for parameter in engine.model.parameters()))
"""


@pytest.mark.soak
def test_copies_of_a_weight_update_are_counted(tmp_path: Path) -> None:
    counts, path = tmp_path / "counts.jsonl", f"{ROOT / 'benchmarks' / 'streaming' / 'counted'}:{ROOT}"
    environment = os.environ | {"BRAID_COUNTED": str(counts), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", UPDATES], env=environment, capture_output=True, text=True, check=True)
    file_bytes, model_bytes = map(int, done.stdout.split())
    written, mapped, copied = (json.loads(line) for line in counts.read_text().splitlines())
    assert written == {"kind": "write", "torch": 0, "system": file_bytes}
    assert mapped == {"kind": "load", "torch": 0, "system": 0}
    # Each tensor once, those that the decoder has joined too.
    assert copied == {"kind": "load", "torch": model_bytes, "system": 0}
