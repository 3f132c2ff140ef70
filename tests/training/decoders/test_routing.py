"""The experts that an engine chose are recorded for each token, and a trainer that replays them keeps its gradient."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from braidrl.agents.trajectory import response_columns
from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import IDENTITY, Rows
from braidrl.data.token_columns import ROUTED_EXPERTS
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import Request, Response, SamplingParams, joined, remaining_request
from braidrl.training.compute.attention import PackedSequences
from braidrl.training.compute.packed import HAS_ENTRIES, Packed, pack
from braidrl.training.decoders.body import PACKED, checkpoint_activations, run_body, use_plan
from braidrl.training.decoders.head import logits_of
from braidrl.training.decoders.routing import Routing, routed, use_routing
from tests.engines.tiny import SIZES, make_requests, make_tokenizer

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {**SIZES, "initializer_range": 0.5, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=8, tie_word_embeddings=False),
    "deepseek_v3": DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4},
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=0,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
}
SAMPLING = SamplingParams(max_tokens=20, ends=False)


def make_moe(kind: str = "qwen3_moe", dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[kind]), dtype=dtype, attn_implementation=PACKED.attention)
    use_plan(model, PACKED)
    return model.eval()


def wanted(groups: int = 3, samples: int = 3) -> list[Request]:
    requests = make_requests(groups, samples, SAMPLING, shortest=4)
    lengths = [5 + 3 * number % 16 for number in range(len(requests))]
    return [
        Request(r.uid, r.prompt, SamplingParams(max_tokens=most, ends=False), columns=(ROUTED_EXPERTS,))
        for r, most in zip(requests, lengths, strict=True)
    ]


def table(requests: list[Request], finished: list[Response]) -> Rows:
    rows = Rows(
        {
            **{name: torch.tensor([r.uid[n] for r in requests]) for n, name in enumerate(IDENTITY)},
            "prompt": Ragged.from_rows([r.prompt for r in requests], torch.int64),
        }
    )
    return rows.with_columns(response_columns(rows, finished, [ROUTED_EXPERTS]))


def log_probs(model: Any, packed: Packed, routing: Routing | None = None) -> torch.Tensor:
    use_routing(model)
    with routed(routing):
        hidden = run_body(model, packed.input_ids[None], packed.position_ids[None], packed.attention())[0]
    scores = logits_of(model, hidden[packed.predictors]).log_softmax(-1)
    return scores.gather(-1, packed.targets[:, None])[:, 0]


def replay(packed: Packed) -> Routing:
    return Routing(packed.per_token[ROUTED_EXPERTS], packed.per_token[HAS_ENTRIES])


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_engine_records_what_each_token_was_given_and_no_idle_slot(kind: str) -> None:
    model, requests = make_moe(kind), wanted()
    finished = EmbeddedEngine(model, make_tokenizer(), Decoding(16, 64)).generate(requests)
    for request, response in zip(requests, finished, strict=True):
        ids, routing = torch.cat([request.prompt, response.tokens]), Routing()
        with torch.no_grad(), routed(routing):
            run_body(model, ids[None], torch.arange(len(ids))[None], PackedSequences.of([len(ids)]))
        routes = response.per_token[ROUTED_EXPERTS]
        assert routes.dtype == torch.uint8 and routes.shape == (len(ids) - 1, 2, 2)
        assert torch.equal(routes.long(), routing.recorded()[:-1]), "the order inside top-k too"


def test_a_replay_of_other_routes_gives_the_log_probs_of_the_engine_that_chose_them() -> None:
    engine, requests = make_moe(), wanted()
    trainer = deepcopy(engine)
    with torch.no_grad():
        for name, parameter in trainer.named_parameters():
            if "gate.weight" in name:  # a router that rounds differently, and much
                parameter.add_(0.05 * torch.randn(parameter.shape, dtype=parameter.dtype))
    finished = EmbeddedEngine(engine, make_tokenizer(), Decoding(16, 64)).generate(requests)
    packed = pack(table(requests, finished), CPU)
    own = Routing()
    free = log_probs(trainer, packed, own)
    has = packed.per_token[HAS_ENTRIES]
    given = packed.per_token[ROUTED_EXPERTS][has].long()
    differ = (own.recorded()[has].sort(-1).values != given.sort(-1).values).any(-1).double().mean()
    replayed = replay(packed)
    held = log_probs(trainer, packed, replayed)
    drawn = torch.cat([response.log_probs for response in finished])
    assert 0.02 < differ < 1 and (held - drawn).abs().mean() < 0.8 * (free - drawn).abs().mean()
    assert torch.equal(replayed.recorded()[has], given)
    # With the engine's own weights nothing changes.
    torch.testing.assert_close(log_probs(engine, packed, replay(packed)), drawn, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_of_a_replay_equal_finite_differences_also_where_layers_are_recomputed(kind: str) -> None:
    model, requests = make_moe(kind), wanted(2, 2)
    finished = EmbeddedEngine(make_moe(kind, seed=1), make_tokenizer(), Decoding(16, 64)).generate(requests)
    packed = pack(table(requests, finished), CPU)
    weights = [p for name, p in model.named_parameters() if "gate.weight" in name]
    assert len(weights) == 2

    def loss() -> torch.Tensor:
        return log_probs(model, packed, replay(packed)).sum()

    gradients = torch.autograd.grad(loss(), weights)
    for weight, gradient in zip(weights, gradients, strict=True):
        assert float(gradient.abs().max()) > 1e-3, "the router learns, also where it would choose other experts"
        place = int(gradient.abs().argmax())
        with torch.no_grad():
            # Routers compute scores in float32, so that a smaller step would measure their rounding.
            flat, ends = weight.view(-1), []
            before = flat[place].clone()
            for step in (1e-2, -1e-2):
                flat[place] = before + step
                ends.append(float(loss()))
            flat[place] = before
        assert (ends[0] - ends[1]) / 2e-2 == pytest.approx(float(gradient.view(-1)[place]), rel=1e-3)
    checkpoint_activations(model.train())
    again = torch.autograd.grad(loss(), weights)
    assert all(torch.equal(one, other) for one, other in zip(again, gradients, strict=True))


def test_a_suspended_row_keeps_the_routes_of_the_version_that_drew_each_token() -> None:
    (request, *_) = wanted(1, 1)
    first = EmbeddedEngine(make_moe(), make_tokenizer(), Decoding(16, 64))
    first.add(request)
    for _ in range(3):
        first.step()
    ended = first.abort(request.uid)
    rest = remaining_request(request, ended)
    assert rest is not None
    second = EmbeddedEngine(make_moe(seed=1), make_tokenizer(), Decoding(16, 64))
    (later,) = second.generate([rest])
    whole = joined([ended, later])
    known, routes = len(request.prompt) + 2, whole.per_token[ROUTED_EXPERTS]
    assert len(routes) == len(request.prompt) + len(whole.tokens) - 1
    assert torch.equal(routes[:known], ended.per_token[ROUTED_EXPERTS])
    assert torch.equal(routes[known:], later.per_token[ROUTED_EXPERTS][known:])
    assert not torch.equal(routes[:known], later.per_token[ROUTED_EXPERTS][:known]), "both route alike"


def test_more_than_256_experts_take_two_bytes_and_replay() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=300, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=PACKED.attention)
    use_plan(model, PACKED)
    requests = wanted(2, 2)
    finished = EmbeddedEngine(model.eval(), make_tokenizer(), Decoding(16, 64)).generate(requests)
    rows = table(requests, finished)
    assert rows[ROUTED_EXPERTS].values.dtype == torch.int16 and int(rows[ROUTED_EXPERTS].values.max()) > 255
    packed = pack(rows, CPU)
    drawn = torch.cat([response.log_probs for response in finished])
    torch.testing.assert_close(log_probs(model, packed, replay(packed)), drawn, rtol=0, atol=1e-9)
