"""vLLM records the experts that each token was given: of prompts that rows share and that it computes in pieces, of
rows that were preempted or suspended, after each update.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from braidrl.data.token_columns import ROUTED_EXPERTS
from braidrl.engines.engine_contract import all_of
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.training.compute.attention import PackedSequences
from braidrl.training.decoders.body import run_body
from braidrl.training.decoders.head import logits_of
from braidrl.training.decoders.routing import Routing, routed, use_routing
from braidrl.training.loading import load_decoder
from braidrl.weights.publisher import ModelWeights
from tests.engines.served import Served
from tests.training.decoders.families import write_family
from tests.training.decoders.test_families import ON_VLLM

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak]
BLOCKS = {"qwen3_moe": 8, "deepseek_v3": 45}
"""By family the blocks of keys and values, which have room for some of the rows."""


def submitted() -> list[Request]:
    """Return two samples of each of four prompts of 40 tokens, whose responses need a second block."""
    prompts = torch.randint(0, 16, (4, 40), generator=torch.Generator().manual_seed(3))
    sampling = SamplingParams(max_tokens=100, ends=False)
    return [
        Request((0, group, sample), prompt, sampling, columns=(ROUTED_EXPERTS,))
        for group, prompt in enumerate(prompts)
        for sample in range(2)
    ]


def in_training(model: object, request: Request, response: Response, is_given: bool) -> tuple[torch.Tensor, ...]:
    """Return the routes of a response (N, L, k) and its log-probs (T,), of the model's routers or of the engine's."""
    ids, routes = torch.cat([request.prompt, response.tokens])[:-1], response.per_token[ROUTED_EXPERTS]
    routing = Routing(routes.long(), torch.ones(len(ids), dtype=torch.bool)) if is_given else Routing()
    with torch.no_grad(), routed(routing):
        hidden = run_body(model, ids[None], torch.arange(len(ids))[None], PackedSequences.of([len(ids)]))[0]
        scores = logits_of(model, hidden[len(request.prompt) - 1 :]).log_softmax(-1)
    return routing.recorded(), scores.gather(-1, response.tokens[:, None])[:, 0]


def served_of(folder: Path, family: str, dtype: str = "float32") -> Served:
    # A step computes 24 tokens, so that prompts are computed in pieces.
    small = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": BLOCKS[family]}
    return Served("vllm", folder, limit_s=500.0, dtype=dtype, **small)


def differing(routes: torch.Tensor, others: torch.Tensor) -> float:
    """Return the share of tokens and layers with other experts, in any order."""
    return float((routes.long().sort(-1).values != others.sort(-1).values).any(-1).float().mean())


@pytest.mark.parametrize("family", BLOCKS)
def test_vllm_records_the_experts_of_each_token_also_after_an_update(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path / "model", family, **ON_VLLM[family])
    trained = load_decoder(str(folder), torch.float32, "cpu").requires_grad_(False).eval()
    use_routing(trained)
    with closing(served_of(folder, family)) as served:
        for version in range(2):
            served.run(served.engine.update_weights(version, ModelWeights(trained)))
            requests = submitted()
            for request, response in zip(requests, served.run(all_of(served.engine, requests)), strict=True):
                routes = response.per_token[ROUTED_EXPERTS]
                recorded, log_probs = in_training(trained, request, response, is_given=False)
                assert routes.dtype == torch.uint8 and routes.shape == recorded.shape
                assert differing(routes, recorded) < 0.01
                torch.testing.assert_close(response.log_probs, log_probs, rtol=0, atol=1e-4)
            for name, parameter in trained.named_parameters():
                if "gate.weight" in name:
                    parameter.add_(0.05 * torch.randn(parameter.shape))


def test_a_replay_of_a_half_precision_engines_experts_narrows_the_gap_of_log_probs(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "qwen3_moe", **ON_VLLM["qwen3_moe"])
    trained = load_decoder(str(folder), torch.float32, "cpu").requires_grad_(False).eval()
    use_routing(trained)
    for name, parameter in trained.named_parameters():
        if "experts" in name:
            parameter.mul_(4)
    requests = submitted()
    with closing(served_of(folder, "qwen3_moe", "bfloat16")) as served:
        served.run(served.engine.update_weights(1, ModelWeights(trained)))
        finished = served.run(all_of(served.engine, requests))
    shares, gaps = [], {True: 0.0, False: 0.0}
    for request, response in zip(requests, finished, strict=True):
        for is_given in gaps:
            routes, log_probs = in_training(trained, request, response, is_given)
            gaps[is_given] += float((log_probs - response.log_probs).abs().mean()) / len(requests)
            shares += [] if is_given else [differing(response.per_token[ROUTED_EXPERTS], routes)]
    share = sum(shares) / len(shares)
    print(f"{share:.2%} of choices differ; gap of log-probs {gaps[False]:.1e}, with their replay {gaps[True]:.1e}")
    assert 0 < share < 0.2 and gaps[True] < 0.8 * gaps[False]
