"""Servers with token ids over HTTP, for tests: vLLM's own, and an embedded engine that speaks SGLang's protocol."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from aiohttp import web

from braidrl.data.rows import Uid
from braidrl.engines.requests import Request, SamplingParams
from braidrl.engines.stepping import EngineReplica
from braidrl.weights.file import WeightFile
from tests.engines.served import LIMIT, vllm_python
from tests.tiny import ROOT, free_port

STOCK = (
    "--enforce-eager",
    "--dtype",
    "float32",
    "--max-model-len",
    str(LIMIT),
    "--max-num-seqs",
    "16",
    "--kv-cache-memory-bytes",
    str(8 << 20),
)
ARGUMENTS = (
    *STOCK,
    "--logprobs-mode",
    "processed_logits",
    "--logits-processors",
    "braidrl.engines.vllm.logits_processor:DrawByRow",
    "--worker-extension-cls",
    "braidrl.engines.vllm.vllm_worker.TakesWeights",
)
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": str(ROOT),
}


FORKED = """
import multiprocessing, runpy
get_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
"""
"""vLLM's server, whose engine and worker are copies of it: on a CPU each would import vLLM again, for ten seconds."""


class VllmServer:
    """Start vLLM's server in a separate process."""

    def __init__(
        self, model: Path, limit_s: float = 500.0, arguments: Sequence[str] = ARGUMENTS, python: Path | None = None
    ) -> None:
        self.model, port, python = model, free_port(), python or vllm_python()
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                str(python or sys.executable),
                "-W",
                "ignore",
                "-c",
                FORKED,
                *arguments,
                "--model",
                str(model),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ],
            env={**os.environ, **SETTINGS},
            start_new_session=True,
        )
        try:
            self._wait(time.monotonic() + limit_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server and its child processes, if they have not ended themselves."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait(self, end: float) -> None:
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"vLLM's server did not start; its exit status is {self._process.returncode}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=1).status == 200
        except (URLError, OSError):
            return False


class SglangSpeaker:
    """A server with SGLang's protocol; its tokens come from an embedded engine, by seed and position."""

    def __init__(self, engine: EngineReplica) -> None:
        self.engine, self.weights = engine, "default"
        self.settings: dict[str, Any] = {"enable_deterministic_inference": True, "context_length": LIMIT}
        self.refuses_weights = False
        self._uids: dict[str, Uid] = {}
        self._loaded = 0

    async def start(self) -> str:
        """Return its address."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/get_server_info", self._settings),
                web.get("/get_model_info", self._info),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/update_weights_from_disk", self._load),
            ]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        port = free_port()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{port}"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _settings(self, _: web.Request) -> web.Response:
        return web.json_response(self.settings)

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weights})

    async def _generate(self, asked: web.Request) -> web.Response:
        body = await asked.json()
        said, prompt = body["sampling_params"], torch.tensor(body["input_ids"])
        sampling = SamplingParams(
            said["temperature"],
            said["top_p"],
            max(said["top_k"], 0),
            said["max_new_tokens"],
            tuple(said["stop_token_ids"]),
            tuple(said["stop"]),
            ends=not said["ignore_eos"],
        )
        uid = self._uids[body["rid"]] = (0, said["sampling_seed"], 0)
        finished = await self.engine.submit(Request(uid, prompt, sampling, first_draw=len(prompt)))
        drawn = zip(finished.log_probs.tolist(), finished.tokens.tolist(), strict=True)
        reason = finished.finish_reason.name.lower()
        meta = {"finish_reason": {"type": reason}, "output_token_logprobs": [[*pair, None] for pair in drawn]}
        return web.json_response({"output_ids": finished.tokens.tolist(), "meta_info": meta})

    async def _abort(self, asked: web.Request) -> web.Response:
        uid = self._uids.get((await asked.json())["rid"])
        # An unknown request has not arrived yet, or has ended.
        with suppress(KeyError):
            if uid is not None:
                await self.engine.abort(uid)
        return web.Response()

    async def _load(self, asked: web.Request) -> web.Response:
        if self.refuses_weights:
            return web.json_response({"message": "no room"}, status=500)
        body = await asked.json()
        self._loaded += 1
        weights = WeightFile(Path(body["model_path"]) / "model.safetensors")
        await self.engine.update_weights(self._loaded, weights)
        self.weights = body["weight_version"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})


@contextmanager
def in_a_thread(speaker: SglangSpeaker) -> Iterator[str]:
    """Yield the server's address while it answers beside a run, whose event loop is not the test's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(speaker.start(), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(speaker.close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
