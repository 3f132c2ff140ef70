"""The engine's tokens belong to the row, its log-probs are training's, and every request is answered exactly once."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from braidrl.cluster.world import Ranks
from braidrl.data.rows import FinishReason
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.embedded.prompts import AHEAD_TOKENS, PREFILL_TOKENS
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.errors import UserError
from braidrl.weights.in_place import InPlacePublisher
from braidrl.weights.shards import weight_parts
from braidrl.weights.transfer import LayoutCopy
from tests.engines.tiny import CONFIGS, END, make_model, make_requests, make_tokenizer, training_log_probs

SAMPLED = SamplingParams(temperature=0.8, max_tokens=24)


def make_engine(
    name: str = "qwen3", dtype: torch.dtype = torch.float32, slots: int = 64, seed: int = 0, shrink: bool | None = None
) -> EmbeddedEngine:
    return EmbeddedEngine(make_model(name, dtype), make_tokenizer(), Decoding(slots, 128, seed=seed, shrink=shrink))


def same(first: Response, second: Response) -> bool:
    return torch.equal(first.tokens, second.tokens) and torch.equal(first.log_probs, second.log_probs)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.soak)])
@pytest.mark.parametrize("shrink", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_is_bitwise_equal_alone_and_among_64(name: str, shrink: bool, dtype: torch.dtype) -> None:
    # Prompts of 1 to 92 tokens: in a batch, the step of a short row reads many more positions than alone.
    requests = make_requests(groups=8, samples=8, sampling=SAMPLED, apart=13)
    engine = make_engine(name, dtype, shrink=shrink)
    together = engine.generate(requests)
    for number in (0, 13, 37, 63):
        (alone,) = engine.generate([requests[number]])
        assert same(alone, together[number])


def test_tokens_do_not_depend_on_order_slots_or_refills() -> None:
    requests = make_requests(groups=10, samples=6, sampling=SAMPLED)
    wide = {row.uid: row for row in make_engine(slots=64).generate(requests)}
    narrow = make_engine(slots=16).generate(requests[::-1])
    assert [row.uid for row in narrow] == [request.uid for request in requests[::-1]]
    assert all(torch.equal(row.tokens, wide[row.uid].tokens) for row in narrow)


def test_shrinking_to_the_rows_that_are_left_does_not_change_a_bit() -> None:
    requests = [
        Request(r.uid, r.prompt, SamplingParams(max_tokens=1 + 5 * (i % 11), top_p=0.5 + 0.5 * (i % 2), ends=False))
        for i, r in enumerate(make_requests(groups=10, samples=10, sampling=SAMPLED, apart=5))
    ]
    results, sizes = {}, {}
    for shrink in (True, False):
        model = make_model()
        sizes[shrink] = seen = []
        model.lm_head.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(len(inputs[0])))
        engine = EmbeddedEngine(model, make_tokenizer(), Decoding(64, 128, shrink=shrink, compile=False))
        results[shrink] = engine.generate(requests)
    assert set(sizes[False]) == {64}
    assert set(sizes[True]) == {64, 48, 32, 16}
    assert all(same(small, full) for small, full in zip(results[True], results[False], strict=True))


def test_tokens_depend_on_seed_purpose_stage_group_sample_and_earlier_draws() -> None:
    prompt = torch.arange(5)

    def tokens(uid: tuple[int, int, int] = (0, 0, 0), seed: int = 0, **names: object) -> list[int]:
        request = Request(uid, prompt, SAMPLED, **names)  # type: ignore[arg-type]
        return make_engine(seed=seed).generate([request])[0].tokens.tolist()

    variants = [
        tokens(),
        tokens(seed=1),
        tokens(purpose="eval"),
        tokens(stage="greedy"),
        tokens((0, 1, 0)),
        tokens((0, 0, 1)),
        tokens(first_draw=24),
    ]
    assert len({tuple(variant) for variant in variants}) == len(variants)
    assert tokens() == variants[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_equal_a_packed_training_forward(name: str) -> None:
    model = make_model(name)
    requests = make_requests(groups=6, samples=4, sampling=SAMPLED)
    requests += make_requests(6, 5, SamplingParams(temperature=1.3, top_p=0.7, top_k=20, max_tokens=40))[4::5]
    requests = [Request((0, i, 0), r.prompt, r.sampling) for i, r in enumerate(requests)]
    finished = EmbeddedEngine(model, make_tokenizer(), Decoding(16, 128)).generate(requests)
    for response, expected in zip(finished, training_log_probs(model, requests, finished), strict=True):
        torch.testing.assert_close(response.log_probs, expected, rtol=0, atol=1e-5)


def test_greedy_takes_the_likeliest_token_of_transformers_own_generate() -> None:
    model = make_model()
    finished = EmbeddedEngine(model, make_tokenizer(), Decoding(16, 128)).generate(
        make_requests(3, 1, SamplingParams(temperature=0.0, max_tokens=16), shortest=4)
    )
    model.set_attn_implementation("sdpa")
    for response, request in zip(finished, make_requests(3, 1, SAMPLED, shortest=4), strict=True):
        expected = model.generate(request.prompt[None], do_sample=False, max_new_tokens=16, pad_token_id=END)
        assert response.tokens.tolist() == expected[0, len(request.prompt) :].tolist()


def test_a_prompt_is_computed_once_for_all_rows_that_share_it() -> None:
    engine = make_engine(slots=16)
    requests = make_requests(groups=3, samples=20, sampling=SAMPLED, shortest=5)
    assert len(engine.generate(requests)) == 60
    assert engine._prompts.computed_tokens == 4 + 7 + 10


def test_short_prompts_of_rows_without_a_slot_share_the_pass_of_those_that_start() -> None:
    engine, calls = make_engine(slots=16), list[int]()
    engine.model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape[1]))
    requests = make_requests(groups=40, samples=4, sampling=SAMPLED, shortest=20, apart=1)
    together = engine.generate(requests)
    passes = [call for call in calls if call > 1]
    assert len(passes) == 4 and max(passes) <= AHEAD_TOKENS
    (alone,) = make_engine(slots=16).generate(requests[-1:])
    assert same(alone, together[-1])


def test_more_prompt_tokens_than_one_forward_takes_give_the_same_tokens() -> None:
    requests = make_requests(3, 1, SamplingParams(max_tokens=4, ends=False), shortest=PREFILL_TOKENS // 3, apart=200)
    model, tokenizer = make_model(), make_tokenizer()
    calls: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape[1]))
    together = EmbeddedEngine(model, tokenizer, Decoding(16, 4096)).generate(requests)
    assert [call for call in calls if call > 1] == [5664, 3136], "two prompts, then the third, in multiples of 16"
    (alone,) = EmbeddedEngine(model, tokenizer, Decoding(16, 4096)).generate(requests[2:])
    assert same(alone, together[2])


def test_a_finished_rows_slot_is_filled_in_the_next_step() -> None:
    engine = make_engine(slots=16)
    for number, request in enumerate(make_requests(1, 40, SAMPLED, shortest=3)):
        engine.add(Request(request.uid, request.prompt, SamplingParams(max_tokens=1 + number % 7, ends=False)))
    done = 0
    while engine.in_flight or engine.waiting:
        before = engine.tokens_generated
        finished = engine.step()
        done += len(finished)
        assert engine.tokens_generated - before == min(16, 40 - done + len(finished))
    assert done == 40


def test_stop_tokens_limits_and_end_of_sequence_end_rows_with_their_reason() -> None:
    engine = make_engine()
    (free,) = engine.generate([Request((0, 0, 0), torch.arange(4), SamplingParams(max_tokens=30, ends=False))])
    assert len(free.tokens) == 30 and free.finish_reason is FinishReason.LENGTH
    stop = int(free.tokens[9])
    first = free.tokens.tolist().index(stop)
    (stopped,) = engine.generate(
        [Request((0, 0, 0), torch.arange(4), SamplingParams(max_tokens=30, ends=False, stop_token_ids=(7777, stop)))]
    )
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    likely = make_model()
    likely.lm_head.weight.data.zero_()
    (ended, greedy) = EmbeddedEngine(likely, make_tokenizer(), Decoding(16, 64)).generate(
        [
            Request((0, 0, 0), torch.arange(4), SamplingParams(max_tokens=60)),
            Request((0, 0, 1), torch.arange(4), SamplingParams(max_tokens=100, greedy=True)),
        ]
    )
    assert END not in ended.tokens.tolist()[:-1]
    assert len(greedy.tokens) == 60, "the sequence's limit applies if it is below the response's"


def test_a_stop_text_ends_the_row_also_across_tokens() -> None:
    tokenizer = make_tokenizer()
    engine = make_engine()
    request = Request((0, 0, 0), torch.arange(4), SamplingParams(max_tokens=60, ends=False))
    (free,) = engine.generate([request])
    start = next(i for i in range(60) if all(32 <= byte < 127 for byte in text_bytes(free.tokens[i : i + 2])))
    text = tokenizer.decode(free.tokens[start : start + 2])
    (stopped,) = engine.generate(
        [Request((0, 0, 0), torch.arange(4), SamplingParams(max_tokens=60, ends=False, stop=("never said", text)))]
    )
    assert stopped.finish_reason is FinishReason.STOP
    assert tokenizer.decode(stopped.tokens).endswith(text)
    assert stopped.tokens.tolist() == free.tokens[: start + 2].tolist()


def text_bytes(tokens: Tensor) -> bytes:
    return make_tokenizer().decode(tokens).encode()


def test_versions_say_which_weights_drew_each_token() -> None:
    engine, request = make_engine(), Request((0, 0, 0), torch.arange(4), SamplingParams(max_tokens=6, ends=False))
    for version in (3, 4):
        engine.publish(version)
        (finished,) = engine.generate([request])
        assert finished.versions.tolist() == [version] * 6


def test_prompts_are_computed_again_with_new_weights() -> None:
    requests = make_requests(1, 20, SamplingParams(max_tokens=4, ends=False), shortest=9)
    model = make_model()
    engine = EmbeddedEngine(model, make_tokenizer(), Decoding(16, 128))
    engine.generate(requests)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    engine.publish(1)
    expected = EmbeddedEngine(model, make_tokenizer(), Decoding(16, 128)).generate(requests)
    assert [row.tokens.tolist() for row in engine.generate(requests)] == [row.tokens.tolist() for row in expected]


def test_abort_returns_the_tokens_so_far_and_frees_the_slot() -> None:
    engine = make_engine(slots=16)
    for request in make_requests(1, 18, SamplingParams(max_tokens=9, ends=False), shortest=3):
        engine.add(request)
    engine.step()
    engine.step()
    running, waiting = engine.abort((0, 0, 5)), engine.abort((0, 0, 17))
    assert (len(running.tokens), running.finish_reason) == (2, FinishReason.ABORT)
    assert (len(waiting.tokens), waiting.finish_reason) == (0, FinishReason.ABORT)
    assert waiting.versions.dtype == waiting.tokens.dtype == torch.int64
    assert (engine.in_flight, engine.waiting) == (15, 1)
    engine.step()
    assert (engine.in_flight, engine.waiting) == (16, 0)
    with pytest.raises(KeyError, match="not under way"):
        engine.abort((0, 0, 5))


def test_the_trainers_module_is_used_directly_and_left_unchanged() -> None:
    model = make_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    engine = EmbeddedEngine(model, make_tokenizer(), Decoding(16, 64))
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    first = engine.generate(make_requests(1, 2, SAMPLED))
    assert model.training
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    finished = engine.generate(make_requests(1, 2, SAMPLED))
    assert first[0].tokens.tolist() != finished[0].tokens.tolist(), "the engine uses the trainer's step at once"
    (finished[0].log_probs * torch.ones(1, requires_grad=True)).sum().backward()


def test_an_engine_of_another_dtype_follows_the_trained_weights_at_publication() -> None:
    model = make_model("qwen2-tied")
    engine = EmbeddedEngine(deepcopy(model).double(), make_tokenizer(), Decoding(16, 64))
    copy = LayoutCopy(lambda: weight_parts(model), engine.parts, Ranks())
    request = make_requests(1, 1, SAMPLED, shortest=6)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.1)
    InPlacePublisher(engine, copy).publish(1)
    expected = EmbeddedEngine(deepcopy(model).double(), make_tokenizer(), Decoding(16, 64))
    (mine,), (theirs,) = engine.generate(request), expected.generate(request)
    assert mine.log_probs.dtype == torch.float64
    assert torch.equal(mine.tokens, theirs.tokens)
    torch.testing.assert_close(mine.log_probs, theirs.log_probs, rtol=0, atol=1e-6)
    assert model.dtype == torch.float32


def test_requests_that_cannot_be_answered_are_refused() -> None:
    engine = make_engine()
    with pytest.raises(UserError, match=r"row \(0, 0, 0\): .*128 tokens"):
        engine.generate([Request((0, 0, 0), torch.zeros(128, dtype=torch.int64), SAMPLED)])
    with pytest.raises(ValueError, match="under way already"):
        engine.generate(make_requests(1, 1, SAMPLED) * 2)
    assert (engine.in_flight, engine.waiting) == (0, 0)
    engine.add(make_requests(1, 1, SAMPLED)[0])
    with pytest.raises(RuntimeError, match="1 rows are under way"):
        engine.generate(make_requests(2, 1, SAMPLED)[1:])
    with pytest.raises(ValueError, match="one or more int64 ids"):
        Request((0, 0, 0), torch.zeros(0, dtype=torch.int64), SAMPLED)
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=0.0)
