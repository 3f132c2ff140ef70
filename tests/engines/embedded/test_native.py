"""Compiled decoding samples from the model in every dtype; where it is unavailable, the model's own forward pass
does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig

from braidrl.algorithms.random import uniform
from braidrl.data.rows import FinishReason
from braidrl.data.token_columns import LOG_PROBS
from braidrl.engines.embedded import native_decoder as native
from braidrl.engines.embedded.cpu_kernels import Kernels
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.embedded.native_decoder import native_decoder, side_by_side
from braidrl.engines.embedded.slot_states import DRAWS, SlotStates
from braidrl.engines.requests import Request, SamplingParams
from braidrl.native import building
from braidrl.native.building import build, library
from braidrl.native.linear import has_row_product
from braidrl.training.compute.attention import ATTENTION
from tests.engines.tiny import (
    CONFIGS,
    SIZES,
    VOCABULARY,
    make_model,
    make_requests,
    make_tokenizer,
    response_of,
    training_log_probs,
)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_the_models_own_forward(name: str) -> None:
    requests = make_requests(groups=5, samples=4, sampling=SamplingParams(temperature=0.9, max_tokens=20), apart=7)
    tokens = []
    for compile in (True, False):
        engine = EmbeddedEngine(make_model(name), make_tokenizer(), Decoding(32, 128, compile=compile))
        assert (engine._native is not None) == (compile and (name != "qwen3-moe" or has_row_product(torch.float32)))
        tokens.append([row.tokens.tolist() for row in engine.generate(requests)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_products_follow_weights_that_change_between_and_within_generations(name: str) -> None:
    """Packed weights are copies: they change with a version, also under rows that are under way."""
    tokens = []
    for compile in (True, False):
        engine = EmbeddedEngine(make_model(name), make_tokenizer(), Decoding(16, 128, compile=compile))
        requests = make_requests(groups=2, samples=4, sampling=SamplingParams(max_tokens=12, ends=False))
        drawn = []
        for version in (1, 2):
            for request in requests:
                engine.add(request)
            for _ in range(4):
                engine.step()
            change(engine, 2 * version)
            done = [row for _ in range(8) for row in engine.step()]
            drawn.append([row.tokens.tolist() for row in sorted(done, key=lambda row: row.uid)])
            change(engine, 2 * version + 1)
        engine.clear()
        drawn.append([row.tokens.tolist() for row in engine.generate(requests)])
        tokens.append(drawn)
    assert tokens[0] == tokens[1]


def change(engine: EmbeddedEngine, version: int) -> None:
    """Turn each parameter's values by one, which changes what is drawn, and publish them."""
    with torch.no_grad():
        for parameter in engine.model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.roll(1, -1))
    engine.publish(version)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drawn_tokens_follow_the_models_distribution(dtype: torch.dtype) -> None:
    model, count = make_model("qwen3", dtype), 4000
    prompt = torch.tensor([5, 6, 7])
    requests = [Request((0, 0, i), prompt, SamplingParams(max_tokens=1, ends=False)) for i in range(count)]
    drawn = torch.stack(
        [r.tokens[0] for r in EmbeddedEngine(model, make_tokenizer(), Decoding(256, 8)).generate(requests)]
    )
    every = [Request((0, 0, i), prompt, SamplingParams()) for i in range(VOCABULARY)]
    like = [response_of((0, 0, i), torch.tensor([i]), FinishReason.LENGTH) for i in range(VOCABULARY)]
    expected = torch.cat(training_log_probs(model, every, like)).double().exp()
    counts = torch.bincount(drawn, minlength=VOCABULARY).double()
    likely = expected * count >= 5
    observed = torch.cat([counts[likely], counts[~likely].sum()[None]])
    expected_values = torch.cat([expected[likely], expected[~likely].sum()[None]]) * count
    statistic, freedom = (
        float(((observed - expected_values) ** 2 / expected_values.clamp(min=1e-9)).sum()),
        int(likely.sum()),
    )
    # chi squared has the mean `freedom` and the variance 2 · freedom
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_a_kernels_bits_do_not_depend_on_threads_or_rows() -> None:
    kernels = Kernels(library("decode", torch.float32, HEAD=64, GROUP=2), torch.float32)
    logits = torch.randn(33, 1000) * 4
    temperatures, greedy = torch.rand(33, dtype=torch.float64) + 0.5, torch.arange(33) % 5 == 0
    uniforms = torch.rand(33, dtype=torch.float64)
    tokens, columns = kernels.draw(logits, temperatures, greedy, uniforms)
    log_probs = columns[LOG_PROBS]
    for row in (0, 7, 32):
        part = slice(row, row + 1)
        alone = kernels.draw(logits[part].clone(), temperatures[part], greedy[part], uniforms[part])
        assert int(alone[0]) == int(tokens[row]) and torch.equal(alone[1][LOG_PROBS], log_probs[part])
    expected = (logits / temperatures.float()[:, None]).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
    assert torch.equal(tokens[greedy], logits[greedy].argmax(-1))
    low, high, number = columns[DRAWS].T
    assert torch.equal(number, uniforms.float())
    assert bool(((low <= number + 1e-6) & (number < high + 1e-6))[~greedy].all())
    torch.testing.assert_close((high - low)[~greedy], log_probs[~greedy].exp(), rtol=0, atol=1e-5)
    assert low[greedy].eq(0).all() and high[greedy].eq(1).all(), "any number draws the likeliest token"


def test_a_uniform_at_either_end_draws_a_token_with_a_weight() -> None:
    kernels = Kernels(library("decode", torch.float32, HEAD=64, GROUP=2), torch.float32)
    logits = torch.full((2, 300), -200.0)
    logits[:, [17, 280]] = 0.0
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, _ = kernels.draw(logits, torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bool), ends)
    assert tokens.tolist() == [17, 280]


def test_a_pass_reads_each_rows_token_its_guesses_and_padding_with_the_numbers_that_draw() -> None:
    kernels = Kernels(library("decode", torch.float32, HEAD=64, GROUP=2), torch.float32)
    states = SlotStates.idle(4, torch.float32, torch.device("cpu"), draws=True)
    states.integers.copy_(torch.randint(0, 99, states.integers.shape))
    states.key[:] = torch.tensor([3, -(2**63), 2**63 - 1, -5])
    slots, drafts = torch.tensor([3, 1]), torch.tensor([[7, 8, 9], [4, 5, 6]])
    read = kernels.lay_out(slots, (drafts, torch.tensor([0, 2])), states, 8)
    assert read.rows.tolist() == [0, 1, 1, 1, 0, 0, 0, 0] and read.starts.tolist() == [0, 1, 4]
    assert read.slots.tolist() == [3, 1, 1, 1, -1, -1, -1, -1]
    assert read.tokens.tolist() == [int(states.current[3]), int(states.current[1]), 4, 5, *[int(states.current[3])] * 4]
    of_tokens, offsets = slots[read.rows], torch.tensor([0, 0, 1, 2, 0, 0, 0, 0])
    assert torch.equal(read.positions, states.position[of_tokens] + offsets)
    assert torch.equal(read.numbers, states.drawn[of_tokens] + offsets)
    assert torch.equal(read.shifts, states.shift[of_tokens])
    numbers = states.first_draw[of_tokens] + read.numbers
    assert torch.equal(read.uniforms, uniform(states.key[of_tokens], numbers)), "to the bit"
    plain = kernels.lay_out(slots, None, states, 1)
    assert plain.starts.tolist() == [0, 1, 2] and torch.equal(plain.tokens, states.current[slots])


def test_kernels_are_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "twice.c"
    source.write_text("int twice(int x) { return FACTOR * x; }")
    for factor in (2, 2, 3):
        functions = build(source, FACTOR=factor)
        assert functions is not None and functions.twice(21) == 21 * factor
    assert len(list(tmp_path.glob("braidrl/*.so"))) == 2


def test_a_model_without_kernels_decodes_by_its_own_forward() -> None:
    model = AutoModelForCausalLM.from_config(MistralConfig(**SIZES), attn_implementation=ATTENTION)
    assert native_decoder(model) is None
    assert native_decoder(make_model("qwen3", torch.float64)) is None
    (row,) = EmbeddedEngine(model, make_tokenizer(), Decoding(16, 64)).generate(
        make_requests(1, 1, SamplingParams(max_tokens=4))
    )
    assert len(row.tokens)


@pytest.mark.parametrize("reason", ["no C compiler", "failed on decode.c"])
def test_without_a_compiler_the_model_decodes_by_its_own_forward(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if reason == "no C compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("CC", "false")
    building._say_once.cache_clear()
    monkeypatch.setattr(native, "library", library.__wrapped__)  # which asks for the compiler again
    requests = make_requests(2, 2, SamplingParams(max_tokens=12))
    result = [
        [
            row.tokens.tolist()
            for row in EmbeddedEngine(
                make_model("qwen3"), make_tokenizer(), Decoding(16, 128, compile=compile)
            ).generate(requests)
        ]
        for compile in (True, True, False)
    ]
    assert result[0] == result[1] == result[2]
    assert len(caplog.records) == 1 and reason in caplog.text


def test_fused_weights_share_the_modules_storage() -> None:
    first, second = nn.Linear(4, 3), nn.Linear(4, 5)
    values = torch.cat([first.weight, second.weight]).detach().clone()
    joined = side_by_side([first.weight, second.weight])
    assert torch.equal(joined, values)
    with torch.no_grad():
        second.weight.mul_(2)
    assert torch.equal(joined[3:], 2 * values[3:])
    assert side_by_side([first.weight, second.weight]).data_ptr() == joined.data_ptr(), "no key or value moves twice"
