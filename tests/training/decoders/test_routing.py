"""The experts that an engine chose are recorded for each token, and a trainer that replays them keeps its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


@contextmanager
def hooked(model: Any, hook: Callable[[int, tuple[torch.Tensor, ...]], Any]) -> Iterator[None]:
    """Call `hook` with the layer and the outputs (logits, weights, experts) of each router; it may replace them."""
    with ExitStack() as stack:
        for layer, block in enumerate(model.model.layers):
            handle = block.mlp.gate.register_forward_hook(lambda _, __, outputs, layer=layer: hook(layer, outputs))
            stack.callback(handle.remove)
        yield


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_engine_records_what_each_token_was_given_and_no_idle_slot(kind: str) -> None:
    model, requests = make_moe(kind), wanted()
    finished = EmbeddedEngine(model, make_tokenizer(), Decoding(16, 64)).generate(requests)
    for request, response in zip(requests, finished, strict=True):
        ids, chosen = torch.cat([request.prompt, response.tokens]), dict[int, torch.Tensor]()
        with torch.no_grad(), hooked(model, lambda layer, outputs, chosen=chosen: chosen.update({layer: outputs[2]})):
            run_body(model, ids[None], torch.arange(len(ids))[None], PackedSequences.of([len(ids)]))
        routes = response.per_token[ROUTED_EXPERTS]
        assert routes.dtype == torch.uint8 and routes.shape == (len(ids) - 1, 2, 2)
        # In the order in which the model's routers return them, which is not that of the numbers.
        expected = torch.stack([chosen[0], chosen[1]], 1)[:-1]
        assert torch.equal(routes.long(), expected) and not torch.equal(expected, expected.sort(-1).values)


def test_a_replay_weights_each_given_expert_by_its_score_in_any_order() -> None:
    model, requests = make_moe(), wanted()
    packed = pack(table(requests, EmbeddedEngine(model, make_tokenizer(), Decoding(16, 64)).generate(requests)), CPU)
    routes, has = packed.per_token[ROUTED_EXPERTS], packed.per_token[HAS_ENTRIES]
    with torch.no_grad():
        free = log_probs(model, packed)
        reversed_order = log_probs(model, packed, Routing(routes.flip(-1), has))
    torch.testing.assert_close(reversed_order, free, rtol=0, atol=1e-9)
    others = (routes.long() + 1) % 8  # experts that no router chose

    def replaced(layer: int, outputs: tuple[torch.Tensor, ...]) -> Any:
        logits, weights, experts = outputs
        given = torch.where(has[:, None], others[:, layer], experts)
        scores = logits.softmax(-1, torch.float32).gather(-1, given)
        if model.config.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores.to(weights.dtype), given

    with torch.no_grad():
        with hooked(model, replaced):
            expected = log_probs(model, packed)
        replayed = log_probs(model, packed, Routing(others, has))
    torch.testing.assert_close(replayed, expected, rtol=0, atol=1e-9)
    assert (replayed - free).abs().max() > 0.01


@pytest.mark.parametrize("kind", CONFIGS)
def test_filler_and_last_tokens_of_a_replay_have_the_experts_of_the_router(kind: str) -> None:
    model, requests, free = make_moe(kind), wanted(), Routing()
    packed = pack(table(requests, EmbeddedEngine(model, make_tokenizer(), Decoding(16, 64)).generate(requests)), CPU)
    packed = packed.padded(len(packed.input_ids) + 100)
    with torch.no_grad():
        for routing in (free, replayed := replay(packed)):
            log_probs(model, packed, routing)
    assert int((~packed.per_token[HAS_ENTRIES]).sum()) == 100 + len(requests)
    assert torch.equal(replayed.recorded(), free.recorded())


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
