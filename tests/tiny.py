"""Tiny models, data files and runs shared by the tests of several folders. Everything is made on the spot."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils import logging

from braidrl.config import Config, load_config
from braidrl.observe.metrics import MEASURED, read_metrics
from braidrl.observe.progress import Progress
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import rollout_path
from braidrl.runtimes.prepare.setup import prepare
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.spmd.rank_backend import RankBackend
from braidrl.runtimes.start import start_backend
from tests.commands import Command

logging.disable_progress_bar()
get_checkpoint_conversion_mapping("qwen3")  # Made once, not in each copy of the fork server that loads a model.
ROOT = Path(__file__).parent.parent
ARITHMETIC = ROOT / "examples" / "arithmetic"


def load_module(path: Path) -> ModuleType:
    """Return a Python file outside the package as a module under its own name."""
    if getattr(sys.modules.get(path.stem), "__file__", None) != str(path):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    return sys.modules[path.stem]


task = load_module(ARITHMETIC / "task.py")
TOKENIZER = task.make_tokenizer()
SIZES = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": TOKENIZER.eos_token_id,
    "pad_token_id": TOKENIZER.pad_token_id,
}
MODELS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
}
MIXTURE = Qwen3MoeConfig(
    **{**SIZES, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4},
    head_dim=4,
    moe_intermediate_size=24,
    num_experts=8,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
)
"""Four layers of eight experts, with heads and experts for up to four ranks."""


def write_model(folder: Path, name: str = "qwen3", seed: int = 0) -> Path:
    """Write a random model with a tokenizer for digits, `+`, `=` and `####`, as a Hugging Face directory."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(deepcopy(MODELS[name])).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sums(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return prompts such as `4+7=`, each with a worked response and its answer."""
    pairs = task.problems(count, 1, seed)
    return list(task.demonstrations(pairs, mistakes=0.0, seed=seed))


# A reward that a random model gets occasionally, so that groups differ: the answer's first digit is even.
LENIENT = """
def starts_even(response: str) -> bool:
    return response[:1] in set("02468")


def always_wrong(response: str) -> bool:
    return False


def always_right(response: str) -> bool:
    return True


def unfinished(response: str) -> bool:
    raise KeyError("no score for this")
"""


def settings(folder: Path, model: Path, data: Path, /, **sections: Any) -> dict[str, Any]:
    """Return the configuration of a few steps on a tiny model; `trainer={...}` and others override it section by
    section.
    """
    tree: dict[str, Any] = {
        "flow": "grpo",
        "model": str(model),
        "output": str(folder),
        "name": "run",
        "threads": 1,
        "device": "cpu",
        "data": {"train": str(data)},
        # The sandbox, which costs some milliseconds per row, has its own tests.
        "reward": {"verify": "gsm8k", "sandbox": "none"},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 8, "slots": 16},
        "trainer": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-3, "checkpoint_every": 0},
        "evaluation": {"every": 0},
    }
    for name, value in sections.items():
        tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
    if environment := tree["rollout"].get("environment"):
        named = environment if isinstance(environment, dict) else {"name": environment}
        tree["rollout"]["environment"] = {"sandbox": "none", **named}
    return tree


class Workshop:
    """A folder with a model, data and verifiers, and its runs."""

    def __init__(self, folder: Path, model: Path, data: Path) -> None:
        self.folder, self.model, self.data = folder, model, data
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "verifiers.py").write_text(LENIENT)

    def tree(self, name: str = "run", **sections: Any) -> dict[str, Any]:
        even = {"verify": f"{self.folder}/verifiers.py:starts_even"}
        return settings(self.folder, self.model, self.data, **{"name": name, "reward": even, **sections})

    def config_file(self, name: str = "run", **sections: Any) -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(self.tree(name, **sections)))
        return path

    def config(self, name: str = "run", **sections: Any) -> Config:
        return load_config(self.config_file(name, **sections))

    def run(
        self, name: str = "run", *, replay: Path | None = None, rollout_only: bool = False, **sections: Any
    ) -> Path:
        """Train to the end in this process; return the run folder."""
        with TrainingRun(self.config(name, **sections), replay=replay, rollout_only=rollout_only) as run:
            run.train()
        return run.folder


def metrics_without_times(run: Path) -> list[dict[str, Any]]:
    """Return `metrics.jsonl` without seconds, rates and weight transfers, which differ from run to run."""
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in read_metrics(run)]


def metrics_agree(one: Path, other: Path, tolerance: float = 1e-6) -> bool:
    """Return whether two runs have the same metrics up to rounding: gradients may have been added in another order."""
    pairs = [metrics_without_times(run) for run in (one, other)]
    if [line.keys() for line in pairs[0]] != [line.keys() for line in pairs[1]]:
        return False
    values = [[line[name] for line in lines for name in sorted(line)] for lines in pairs]
    return all(
        a == b or (a is not None and b is not None and abs(a - b) <= tolerance * (1 + abs(a)))
        for a, b in zip(*values, strict=True)
    )


def weights_of(run: Path, role: str = "actor") -> dict[str, torch.Tensor]:
    """Return the model in the latest checkpoint."""
    latest = (run / "checkpoints" / "latest").read_text().strip()
    return load_file(run / "checkpoints" / latest / role / "model.safetensors")


def recorded(run: Path, step: int) -> Any:
    """Return the rows of a training step."""
    return read_rollouts(rollout_path(run, step))


def eager_backend(config: Config) -> RankBackend:
    """Return the objects that execute a run's stages, without the run: loader, workers, engines."""
    prepared = prepare(config)
    backend = start_backend(prepared, Progress(0))
    assert isinstance(backend, RankBackend)
    return backend


def braid(*arguments: Any, folder: Path | None = None, prefix: str = "") -> subprocess.Popen[str]:
    """Start `braid ...` in a new process and process group, which runs the Python code `prefix` before it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return Command([*map(str, arguments)], folder or Path.cwd(), environment, prefix)  # type: ignore[return-value]


def free_port() -> int:
    """Return a local port for a server that is about to start; the kernel gives it to no other process in the
    meantime.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as result, suppress(OSError):
            result.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, max(first, 20_000))))
            return int(result.getsockname()[1])


def wait_for_steps(run: Path, steps: int, process: subprocess.Popen[str], limit_s: float = 400) -> None:
    """Return as soon as the run's metrics have this many steps, while the process continues."""
    deadline = time.monotonic() + limit_s
    path = run / "metrics.jsonl"
    while not path.is_file() or path.read_text().count("\n") < steps:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"the run ended before step {steps}: {process.communicate()}")
        time.sleep(0.005)
