"""vLLM with images: its log-probs are the trainer's, before and after an update of text part and tower, and in runs."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.cli.check_model import check
from braidrl.config import ImagesConfig
from braidrl.engines.engine import EngineSpec
from braidrl.engines.engine_process import EngineProcess
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.weights.publisher import ModelWeights
from tests.engines.http.servers import ARGUMENTS, VllmServer
from tests.engines.served import vllm_python
from tests.tiny import Workshop
from tests.training.decoders.test_images import ROWS, SIZES, Seeing, noise, shapes

# A process of vLLM starts for each test.
pytestmark = [pytest.mark.timeout(600), pytest.mark.soak]
HEAD = 32
"""vLLM's kernels for CPUs need heads of 32 or more."""
SERVES = (*ARGUMENTS, "--max-model-len", "512")


def python() -> Path:
    return vllm_python("vllm-images") or Path(sys.executable)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_log_probs_of_rows_with_images_are_the_trainers_also_after_an_update(family: str, tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, family, torch.float32, head=HEAD)
    other = seeing.vision.store.add(noise(*SIZES[0], 7), tmp_path)
    images = ImagesConfig(folder=tmp_path / "store").model_dump(mode="json")
    spec = EngineSpec("vllm", str(seeing.path), len(ROWS) + 1, 256, images=images, train_vision=True)
    sampling = SamplingParams(max_tokens=6, ends=False)
    asked = [
        Request((0, number, 0), ids, sampling, images=tuple(spans))
        for number, (ids, spans) in enumerate(seeing.prompts)
    ]
    ids, spans = seeing.prompts[0]
    changed = Request((0, 0, 1), ids, sampling, images=tuple(span._replace(name=other) for span in spans))

    async def drawn() -> list[list[Response]]:
        engine = EngineProcess(spec, "vLLM", python(), 500.0)
        try:
            await engine.start()
            first = await asyncio.gather(*map(engine.submit, [*asked, changed]))
            with torch.no_grad():
                for parameter in seeing.model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
            await engine.update_weights(1, ModelWeights(seeing.model))
            return [first, await asyncio.gather(*map(engine.submit, asked))]
        finally:
            await engine.close()

    kept = {name: tensor.clone() for name, tensor in seeing.model.state_dict().items()}
    (*first, seen), second = asyncio.run(drawn())
    assert gap(seeing, second) < 1e-5
    assert not torch.equal(first[0].log_probs, second[0].log_probs)
    seeing.model.load_state_dict(kept)
    assert gap(seeing, first) < 1e-5
    assert not torch.equal(first[0].log_probs[:1], seen.log_probs[:1]), "another image, another distribution"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_braid_check_compares_rows_with_images_with_vllm(family: str, tmp_path: Path) -> None:
    lines: list[str] = []
    check(str(shapes.write_model(tmp_path / "model", 0, family=family)), False, lines.append, python())
    assert any(line.startswith("ok      vLLM equals trainer on rows with images") for line in lines), lines


def test_an_interpreter_without_torchvision_ends_in_a_line(tmp_path: Path) -> None:
    interpreter = vllm_python()
    if interpreter is None or list(interpreter.parent.parent.glob("lib/python*/site-packages/torchvision")):
        pytest.skip("vLLM's interpreter has torchvision")
    images = ImagesConfig(folder=tmp_path / "store").model_dump(mode="json")
    model = shapes.write_model(tmp_path / "model", 0, head=HEAD)
    engine = EngineProcess(EngineSpec("vllm", str(model), 2, 64, images=images), "vLLM", interpreter, 500.0)
    with pytest.raises(UserError, match=r"torchvision.*rollout\.engine=embedded"):
        asyncio.run(engine.start())


def gap(seeing: Seeing, responses: list[Response]) -> float:
    """Return the greatest difference of an engine's log-probs from the trainer's."""
    seeing.images.clear()
    rows = seeing.rows([response.tokens for response in responses])
    return float((seeing.log_probs(rows) - torch.cat([response.log_probs for response in responses])).abs().max())


@pytest.mark.parametrize("trainer", [{"train_vision": True}, {"lora": {"rank": 4}}], ids=["tower", "adapters"])
def test_a_run_with_vllm_sends_the_tower_and_adapters_too(trainer: dict[str, Any], tmp_path: Path) -> None:
    model = shapes.write_model(tmp_path / "model", 0, family="qwen2_5_vl", head=HEAD)
    metrics = trained(model, tmp_path, {"engine": "vllm", "python": str(python())}, trainer)
    assert max(line["train/rollout_log_prob_gap"] for line in metrics) < 1e-5


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_run_with_a_vllm_server_draws_after_images_with_the_trainers_log_probs(family: str, tmp_path: Path) -> None:
    model = shapes.write_model(tmp_path / "model", 0, family=family, head=HEAD)
    with closing(VllmServer(model, arguments=(*SERVES, "--enable-scale-out"), python=python())) as server:
        rollout = {"engine": "http", "reproducible": True, "servers": {"urls": [server.url], "folder": str(tmp_path)}}
        lines = trained(model, tmp_path, rollout, {"train_vision": True})
    assert max(line["train/rollout_log_prob_gap"] for line in lines) < 1e-5


def test_a_vllm_server_without_the_call_for_images_is_named_with_its_option(tmp_path: Path) -> None:
    model = shapes.write_model(tmp_path / "model", 0, head=HEAD)
    with closing(VllmServer(model, arguments=SERVES, python=python())) as server:
        rollout = {"engine": "http", "reproducible": True, "servers": {"urls": [server.url], "folder": str(tmp_path)}}
        with pytest.raises(UserError, match=r"takes no images: start it with --enable-scale-out"):
            trained(model, tmp_path, rollout, {})


def test_images_for_a_server_of_sglang_are_refused_before_a_model_is_read(tmp_path: Path) -> None:
    model = shapes.write_model(tmp_path / "model", 0)
    (model / "model.safetensors").unlink()
    servers = {"urls": ["http://127.0.0.1:1"], "dialect": "sglang"}
    with pytest.raises(UserError, match=r"has images, .*servers of sglang.*rollout\.engine=embedded or vllm"):
        trained(model, tmp_path, {"engine": "http", "servers": servers}, {})


def trained(model: Path, folder: Path, rollout: dict[str, Any], trainer: dict[str, Any]) -> list[dict[str, Any]]:
    """Train three steps of GRPO on questions about drawings; return the metrics."""
    data = shapes.write_data(folder, 8, 0, "train")
    (folder / "even.py").write_text("def is_even(response: str) -> bool:\n    return len(response) % 2 == 0\n")
    sections: dict[str, Any] = {
        "flow": "grpo",
        "data": {"train": str(data), "images": {"folder": str(folder / "store")}},
        "reward": {"verify": f"{folder}/even.py:is_even"},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 4, **rollout},
        "trainer": {"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-2, "checkpoint_every": 0, **trainer},
    }
    metrics = read_metrics(Workshop(folder, model, data).run("run", **sections))
    assert any(line["actor/grad_norm"] > 0 for line in metrics)
    return metrics
