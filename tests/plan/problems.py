"""Small planning problems that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaConfig

from braidrl.cluster.device_kinds import Cluster, DeviceKind, NodeGroup
from braidrl.config import parse_config
from braidrl.flow.recipes import load_flow
from braidrl.plan.problem import Problem
from braidrl.plan.rates import Rates
from braidrl.plan.work import Lengths

GIB = 1 << 30


def write_sizes(folder: Path, width: int = 64, layers: int = 4, heads: int = 4, vocabulary: int = 512) -> Path:
    """Write a model's configuration without weights."""
    LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


def cluster(nodes: int, devices: int, memory: int = 80 * GIB, speed: float = 1e12, name: str = "test") -> Cluster:
    """Return devices with round figures."""
    kind = DeviceKind(
        source="made up",
        peak={"float32": speed, "bfloat16": 2 * speed},
        memory=memory,
        bandwidth=1e11,
        link=1e10,
        network=2e9,
        host=1e9,
    )
    return Cluster(groups=(NodeGroup(kind=name, nodes=nodes, devices=devices),), kinds={name: kind})


def problem(
    model: Path,
    devices: Cluster,
    flow: str = "ppo",
    rows: int = 32,
    response: int = 64,
    roles: Any = None,
    **trainer: Any,
) -> Problem:
    """Return a problem whose rows all have the same length but for a tail."""
    config = parse_config(
        {
            "flow": flow,
            "model": str(model),
            "data": {"max_prompt_tokens": 32},
            "roles": roles or {},
            "rollout": {"samples_per_prompt": 4, "max_response_tokens": response, "slots": 16},
            "trainer": {"prompts_per_step": rows // 4, "max_tokens_per_device": 512, **trainer},
        }
    )
    built = load_flow(flow, config.algorithm, {"max_response_tokens": response, "samples_per_prompt": 4})
    responses = np.linspace(response // 4, response, rows).round().astype(np.int64)
    lengths = Lengths(np.full(rows, 32), responses)
    return Problem(config, built, devices, lengths, {name: Rates() for name in devices.kinds})
