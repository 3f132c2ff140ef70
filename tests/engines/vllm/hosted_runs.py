"""Runs with vLLM on the ranks that train, made by the interpreter that has vLLM: `python -m
tests.engines.vllm.hosted_runs TASK.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from braidrl.cluster.local import copy_as_fork_server
from braidrl.cluster.ranks import run_ranks
from braidrl.config import parse_config
from braidrl.runtimes.run import TrainingRun
from tests.engines.served import vllm_python
from tests.runtimes.spmd.ranks import run_in_ranks
from tests.tiny import ROOT, SIZES, TOKENIZER

ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
VOCABULARY = -(-len(TOKENIZER) // 256) * 256
"""So many tokens that vLLM and the trainer divide the embedding alike over four ranks."""


def write_wide_model(folder: Path) -> Path:
    """Write a model that four ranks of vLLM divide, whose heads it can compute with on a CPU."""
    sizes = {**SIZES, "vocab_size": VOCABULARY, "num_attention_heads": 8, "num_key_value_heads": 4}
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(deepcopy(config)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def vllm_interpreter() -> str:
    return str(vllm_python() or sys.executable)


def hosted(task: Mapping[str, Any], folder: Path) -> Any:
    """Do a task below with vLLM's interpreter; return what it found."""
    given, result = folder / "task.json", folder / "found.json"
    given.write_text(json.dumps(task))
    command = [vllm_interpreter(), "-m", "tests.engines.vllm.hosted_runs", str(given), str(result)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(result.read_text())


def main(given: Path, found: Path) -> None:
    task = json.loads(given.read_text())
    if "measure" in task:
        entry = "tests.weights.transitions:measure"
        found.write_text(json.dumps(run_ranks(entry, task["measure"], task["workers"], 600.0)))
        return
    if task["workers"]:
        # The ranks are copies of a process that has imported vLLM, which takes ten seconds.
        assert copy_as_fork_server(["braidrl.engines.vllm.hosted", "tests.runtimes.spmd.ranks"])
        run_in_ranks(task["runs"], task["workers"])
    else:
        for tree in task["runs"]:
            with TrainingRun(parse_config(tree)) as run:
                run.train()
    found.write_text("null")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
