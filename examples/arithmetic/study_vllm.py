"""The study of vLLM's own server: a run learns from tokens that it draws by its own numbers, at its own speed.

Both servers run side by side; the second one is started as `rollout.reproducible=true` needs it, and draws for a few
steps.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from pages import curve, table
from study import RESPONSE_TOKENS, SCORE, Numbers, Study

from braidrl.observe.metrics import read_metrics

PYTHON = Path("build/vllm-venv/bin/python")
PROMPT_TOKENS = 64
STARTED = (
    "--enforce-eager",
    "--dtype",
    "float32",
    "--max-model-len",
    str(PROMPT_TOKENS + RESPONSE_TOKENS),
    "--max-num-seqs",
    "128",
    "--kv-cache-memory-bytes",
    str(64 << 20),
)
WAYS = {
    "false": (),
    "true": (
        "--logprobs-mode",
        "processed_logits",
        "--no-async-scheduling",
        "--logits-processors",
        "braidrl.engines.vllm.logits_processor:DrawByRow",
    ),
}
"""What a server is started with, by `rollout.reproducible`: nothing, or what draws tokens by row."""
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
STEPS, ROUNDS, BESIDE, START_S = 40, 3, 5, 600.0
"""Steps of the run that learns; then so many short runs of each way, in turn, of so many steps."""


def vllm(study: Study) -> Numbers:
    """GRPO with a stock server, and its speed beside that of one that draws by row."""
    model, speeds, gaps = study.warm_model(), {way: list[float]() for way in WAYS}, dict.fromkeys(WAYS, 0.0)
    with ExitStack() as servers:
        urls = {way: servers.enter_context(server(model, *arguments)) for way, arguments in WAYS.items()}

        def metrics(way: str, name: str, steps: int, evaluates: bool = False) -> list[dict[str, Any]]:
            tree = study.policy(
                "grpo",
                {},
                rollout={
                    "engine": "http",
                    "servers": {"urls": [urls[way]]},
                    "reproducible": way == "true",
                    "samples_per_prompt": 8,
                    "max_response_tokens": RESPONSE_TOKENS,
                    "slots": 128,
                },
            )
            tree["trainer"] |= {"steps": steps}
            tree["data"]["max_prompt_tokens"] = PROMPT_TOKENS
            lines = read_metrics(study.run(name, tree if evaluates else tree | {"evaluation": {"every": 0}}))
            gaps[way] = max(gaps[way], *(line.get("train/rollout_log_prob_gap") or 0.0 for line in lines))
            return lines

        points = curve(metrics("false", "vllm-learns", STEPS, evaluates=True), SCORE)
        # In turn, so that what else the machine does slows both.
        for number in range(ROUNDS):
            for way in WAYS:
                # The first step warms up.
                lines = metrics(way, f"vllm-{way}-{number}", BESIDE)[1:]
                speeds[way] += [line["tokens/generated"] / line["time/actor.generate"] for line in lines]
    text = table(
        [
            "`rollout.reproducible`",
            "tokens per second of generation, median",
            "fastest step",
            "largest `train/rollout_log_prob_gap`, nats",
        ],
        [[way, f"{median(own):,.0f}", f"{max(own):,.0f}", f"{gaps[way]:.1e}"] for way, own in speeds.items()],
    )
    study.page(
        "vllm",
        "vLLM in a run",
        "A run learns from a stock server: GRPO on sums, 32 prompts with 8 responses a step. `vllm serve` draws by "
        "its own random "
        "numbers, with async scheduling and in a process of its own, and reads each version from a folder. "
        f"Held-out avg@4 goes from {points[0][1]:.2f} at step {points[0][0]:.0f} to {points[-1][1]:.2f} at step "
        f"{points[-1][0]:.0f}. "
        f"The table is of {ROUNDS} short runs of each way, in turn, while both servers are there."
        f"\n\n{text}\n" + study.curves("vllm", "Held-out avg@4", {"rollout.reproducible=false": points}),
    )
    return {
        "first": points[0][1],
        "last": points[-1][1],
        "gap": gaps["false"],
        **{f"speed {way}": median(own) for way, own in speeds.items()},
    }


@contextmanager
def server(model: Path, *arguments: str) -> Iterator[str]:
    """The address of `vllm serve`, which ends with the block."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    settings = SETTINGS | {"PYTHONPATH": os.getcwd()} | ({"VLLM_USE_V2_MODEL_RUNNER": "0"} if arguments else {})
    process = subprocess.Popen(
        [*command, "--port", str(port), *STARTED, *arguments], env=os.environ | settings, start_new_session=True
    )
    try:
        end, url = time.monotonic() + START_S, f"http://127.0.0.1:{port}"
        while not answers(url):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"vLLM's server did not start; its exit status is {process.returncode}")
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    with suppress(OSError):
        return bool(urllib.request.urlopen(f"{url}/health", timeout=1).status == 200)
    return False
