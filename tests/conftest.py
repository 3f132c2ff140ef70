"""Shared by all tests: one thread per process, and a fixed hypothesis profile."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, max_examples=50)
settings.load_profile("suite")
