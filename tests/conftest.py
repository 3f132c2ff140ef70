"""Shared by all tests: one thread per process, and a fixed hypothesis profile."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

from tests.tiny import MODELS, Workshop, sums, write_jsonl, write_model

torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, max_examples=50)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face directory for each of the tiny models."""
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / name, name) for name in MODELS}


@pytest.fixture(scope="session")
def sums_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty one-digit sums with answers and responses."""
    return write_jsonl(tmp_path_factory.mktemp("data") / "sums.jsonl", sums(40))


@pytest.fixture
def workshop(tmp_path: Path, tiny_models: dict[str, Path], sums_file: Path) -> Workshop:
    """Runs on the tiny Qwen3, in a folder of the test's own."""
    return Workshop(tmp_path, tiny_models["qwen3"], sums_file)
