"""vLLM records the experts that each token was given: of prompts that rows share and that it computes in pieces, of
rows that were preempted or suspended, after each update.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braidrl.data.rows import FinishReason
from braidrl.data.token_columns import ROUTED_EXPERTS
from braidrl.engines.engine_contract import all_of
from braidrl.engines.requests import Request, Response, SamplingParams, joined, remaining_request
from braidrl.observe.metrics import read_metrics
from braidrl.training.compute.attention import PackedSequences
from braidrl.training.decoders.body import run_body
from braidrl.training.decoders.head import logits_of
from braidrl.training.decoders.routing import Routing, routed, use_routing
from braidrl.training.loading import load_decoder
from braidrl.weights.publisher import ModelWeights
from tests.engines.served import Served, vllm_python
from tests.invariants.traces import EVERY_STEP, merged
from tests.tiny import Workshop, recorded, sums, write_jsonl
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
    return by_routes(model, request, response, response.per_token[ROUTED_EXPERTS] if is_given else None)


def by_routes(
    model: object, request: Request, response: Response, routes: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Return the routes of a response (N, L, k) and its log-probs (T,) under given routes, or the model's routers."""
    ids = torch.cat([request.prompt, response.tokens])[:-1]
    routing = Routing() if routes is None else Routing(routes.long(), torch.ones(len(ids), dtype=torch.bool))
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


def suspended(served: Served, requests: Sequence[Request]) -> list[Response]:
    """Return the first parts of rows, whose budgets of tokens end in different steps."""
    budgets = [replace(request.sampling, max_tokens=20 + 5 * n) for n, request in enumerate(requests)]
    started = [replace(request, sampling=budget) for request, budget in zip(requests, budgets, strict=True)]
    parts = served.run(all_of(served.engine, started))
    return [replace(part, finish_reason=FinishReason.ABORT) for part in parts]


def mean_gaps(
    model: object, request: Request, response: Response, drawn: slice, routes: torch.Tensor
) -> tuple[float, float]:
    """Return the mean gaps of the log-probs of drawn tokens, in nats: without replay, and with these routes."""
    plain, given = (by_routes(model, request, response, value)[1] for value in (None, routes))
    return tuple(float((log_probs - response.log_probs)[drawn].abs().mean()) for log_probs in (plain, given))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_suspended_row_replays_the_experts_that_each_version_chose(tmp_path: Path, dtype: str) -> None:
    folder = write_family(tmp_path / "model", "qwen3_moe", **ON_VLLM["qwen3_moe"])
    first = load_decoder(str(folder), torch.float32, "cpu").requires_grad_(False).eval()
    for name, parameter in first.named_parameters():
        if "experts" in name:
            parameter.mul_(4)
    second, requests = deepcopy(first), submitted()
    for name, parameter in second.named_parameters():
        if "gate.weight" in name:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    for model in (first, second):
        use_routing(model)
    with closing(served_of(folder, "qwen3_moe", dtype)) as served:
        served.run(served.engine.update_weights(1, ModelWeights(first)))
        earlier = suspended(served, requests)
        rest = [remaining_request(request, part) for request, part in zip(requests, earlier, strict=True)]
        served.run(served.engine.update_weights(2, ModelWeights(second)))
        later = served.run(all_of(served.engine, [request for request in rest if request is not None]))
    values = list[tuple[float, ...]]()
    for request, old, new in zip(requests, earlier, later, strict=True):
        row, drawn, known = joined([old, new]), len(old.tokens), len(request.prompt) + len(old.tokens) - 1
        routes, chosen_first, chosen_last = (part.per_token[ROUTED_EXPERTS] for part in (row, old, new))
        assert row.versions.tolist() == [1] * drawn + [2] * (100 - drawn)
        assert torch.equal(routes[:known], chosen_first) and torch.equal(routes[known:], chosen_last[known:])
        by_model = [in_training(model, request, row, is_given=False)[0] for model in (first, second)]
        values.append(
            (
                differing(chosen_first, by_model[0][:known]),
                differing(chosen_last[known:], by_model[1][known:]),
                differing(chosen_first, chosen_last[:known].long()),
                *mean_gaps(first, request, row, slice(drawn), routes),
                *mean_gaps(second, request, row, slice(drawn, None), routes),
                mean_gaps(first, request, row, slice(drawn), chosen_last)[1],
            )
        )
    means = [sum(column) / len(values) for column in zip(*values, strict=True)]
    differ, differ_later, changed, plain, replayed, plain_later, replayed_later, of_last = means
    print(
        f"{dtype}: {differ:.2%} and {differ_later:.2%} of choices differ, {changed:.0%} between versions; gap before "
        f"suspension {plain:.1e}, with replay {replayed:.1e}, with the later version's experts {of_last:.1e}; after it "
        f"{plain_later:.1e}, with replay {replayed_later:.1e}"
    )
    assert changed > 0.1 and of_last > 5 * replayed
    if dtype == "float32":
        assert max(differ, differ_later) < 0.01 and max(plain, replayed, plain_later) < 1e-4
    else:
        assert replayed < 0.8 * plain and replayed_later < 0.8 * plain_later


def test_a_run_with_suspended_rows_replays_vllms_routes(tmp_path: Path) -> None:
    model, python = write_family(tmp_path / "model", "qwen3_moe", **ON_VLLM["qwen3_moe"]), vllm_python()
    shop = Workshop(tmp_path, model, write_jsonl(tmp_path / "train.jsonl", sums(64)))
    partial = {"tokens_per_iteration": 7, "max_response_tokens": 20, "temperature": 0.8, "max_sequence_tokens": 100}
    trainer = {"steps": 3, "max_staleness": 2, "surplus": "keep", "learning_rate": 1e-3}
    algorithm = {"replay": "inference", "old": "recompute"}
    sections = merged(EVERY_STEP, {"dtype": "float32", "trainer": trainer, "rollout": partial, "algorithm": algorithm})
    by_vllm = {"engine": "vllm", "reproducible": True, "python": str(python) if python else None}
    served, alone = shop.run("vllm", **merged(sections, {"rollout": by_vllm})), shop.run("alone", **sections)
    for step in range(1, 4):
        ours, theirs = (recorded(run, step).ordered() for run in (served, alone))
        assert ours["tokens"].values.tolist() == theirs["tokens"].values.tolist()
        assert differing(ours[ROUTED_EXPERTS].values, theirs[ROUTED_EXPERTS].values.long()) < 0.01
    assert max(len(set(row.tolist())) for row in recorded(served, 3)["rollout_versions"]) > 1, "no row was suspended"
    for ours, theirs in zip(read_metrics(served), read_metrics(alone), strict=True):
        for key in ("train/rollout_log_prob_gap", "actor/grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-2, abs=1e-4)
