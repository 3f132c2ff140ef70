"""`braid doctor`: a report on this machine, with a training step of a tiny model."""

import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from braidrl.cluster.devices import assign_devices, device_lines
from braidrl.cluster.pools import Pool
from braidrl.cluster.process import usable_cores
from braidrl.importing import PACKAGES, version_of
from braidrl.training.compute.attention import ATTENTION, PackedSequences
from braidrl.training.compute.log_probs import linear_log_probs
from braidrl.training.decoders.body import run_body
from braidrl.training.operations import keep_rates, measured_rates, rates_file

LEAST_DISK = 1 << 30
RATES_SIDE, RATES_NUMBERS = 1024, 1 << 24
"""Sizes for measuring rates in about two seconds."""


def examine(say: Callable[[str], None]) -> bool:
    """Report each finding in a line; return False if a run could not work."""
    say(f"python {platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        say(f"{name} {version_of(name)}")
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    memory = psutil.virtual_memory()
    say(f"{cores} cores, {torch.get_num_threads()} threads, {memory.available / 2**30:.1f} GiB of memory free")
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        say(f"cuda:{i} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    devices = torch.cuda.device_count()
    for line in device_lines(assign_devices([Pool(("rank",), devices)], devices)):
        say(f"of {devices} ranks, {line}")
    if not torch.cuda.is_available():
        say("no CUDA device: runs use the CPU")
        # The peak rates of this machine's cores are kept for the metrics of runs.
        before = torch.get_num_threads()
        torch.set_num_threads(usable_cores())
        try:
            rates = keep_rates(measured_rates(RATES_SIDE, RATES_NUMBERS))
        finally:
            torch.set_num_threads(before)
        each = ", ".join(f"{rate / 1e9:,.0f} billion {name} operations/s" for name, rate in rates.operations.items())
        say(f"{usable_cores()} cores reach {each} and {rates.bandwidth / 1e9:,.0f} GB/s; kept in {rates_file()}")
    room = shutil.disk_usage(Path.cwd()).free
    say(f"{room / 2**30:.1f} GiB free on disk here")
    if room < LEAST_DISK:
        say("PROBLEM: less than 1 GiB free; set `output` to a folder with room for checkpoints")
    return trains(say) and room >= LEAST_DISK


def trains(say: Callable[[str], None]) -> bool:
    """Run one forward and backward pass of a random model through the attention and log-probs that runs use."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Variable-length attention on CUDA supports only half precision.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, attn_implementation=ATTENTION,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(device, dtype)
    tokens = torch.arange(48, device=device) % 64
    start = time.perf_counter()
    sequences = PackedSequences.of((24, 24), device)
    hidden = run_body(model, tokens[None], sequences.position_ids(), sequences)[0]
    log_probs, _ = linear_log_probs(hidden[:-1], model.get_output_embeddings().weight, tokens[1:])
    log_probs.sum().backward()
    finite = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
    seconds = time.perf_counter() - start
    say(f"a training step of a tiny model on {device}: {seconds:.2f} s" + ("" if finite else "; PROBLEM: not finite"))
    return finite
