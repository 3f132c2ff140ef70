"""Guesses of next tokens change no bit of a response; they are made where they are worth their cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from braidrl.algorithms.random import uniform
from braidrl.config import load_config
from braidrl.data.rows import FinishReason
from braidrl.data.token_columns import token_column, token_columns
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.embedded.slot_states import DRAWS, SlotStates, widened
from braidrl.engines.embedded.speculation import (
    CREDIT,
    DEPTH,
    LOSS,
    EarlierResponses,
    Guesses,
    PassCosts,
    last_tokens,
    useful_guesses,
)
from braidrl.engines.requests import Request, Response, SamplingParams, joined, remaining_request
from braidrl.errors import UserError
from tests.engines.tiny import make_model, make_requests, make_tokenizer

REPEATING = SamplingParams(temperature=0.3, max_tokens=40)
"""At a low temperature tiny models repeat themselves."""


def flat(size: int, guessed: bool) -> float:
    """Return the same cost for passes of any size, so that every guess is worth it."""
    return 1.0


def make_engine(name: str, dtype: torch.dtype, speculation: bool, slots: int = 32) -> EmbeddedEngine:
    model = make_model(name, dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    engine = EmbeddedEngine(model, make_tokenizer(), Decoding(slots, 128, speculation="auto" if speculation else "off"))
    assert (engine.speculation is not None) == speculation
    if engine.speculation is not None:
        engine.speculation.costs = flat
    return engine


def assert_equal(first: Sequence[Response], second: Sequence[Response]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.uid == other.uid and one.finish_reason == other.finish_reason
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.per_token.keys() == other.per_token.keys()
        assert all(torch.equal(one.per_token[name], other.per_token[name]) for name in one.per_token)


@pytest.fixture
def likeliest() -> Iterator[str]:
    """Register a column: the likeliest token's log-prob, of each drawn token."""

    @token_column("likeliest_log_prob")
    def column(logits: Tensor, tokens: Tensor) -> Tensor:
        return logits.log_softmax(-1).amax(-1)

    yield "likeliest_log_prob"
    del token_columns["likeliest_log_prob"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", torch.float32),
        ("qwen3", torch.bfloat16),
        ("qwen2-window", torch.float32),
        ("llama-tied", torch.bfloat16),
    ],
)
def test_guesses_change_no_bit_of_a_response_but_save_passes(name: str, dtype: torch.dtype) -> None:
    requests = make_requests(groups=3, samples=3, sampling=REPEATING, apart=7)
    engine = make_engine(name, dtype, True)
    for _ in range(2):
        assert_equal(engine.generate(requests), make_engine(name, dtype, False).generate(requests))
    counts = engine.speculated
    assert counts is not None and 0 < counts.accepted < counts.drafted
    assert counts.tokens == counts.passes + counts.accepted == engine.tokens_generated
    assert counts.passes < 0.8 * counts.tokens


def test_rows_with_all_kinds_of_sampling_ends_and_columns_are_equal_with_guesses(likeliest: str) -> None:
    plain = make_engine("qwen3", torch.float32, False)
    requests = make_requests(groups=2, samples=6, sampling=REPEATING, apart=7)
    unending = replace(REPEATING, ends=False)
    drawn = [row.tokens for row in plain.generate([replace(request, sampling=unending) for request in requests])]
    text = make_tokenizer().decode(drawn[4][9:11])
    kinds = [
        REPEATING,
        replace(REPEATING, top_p=0.8),
        replace(REPEATING, top_k=3, temperature=1.5),
        replace(REPEATING, greedy=True, max_tokens=1),
        replace(unending, stop=(text,)),
        replace(unending, stop_token_ids=(int(drawn[5][12]),)),
    ]
    heard: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
    result = {}
    for speculation in (True, False):
        engine = plain if not speculation else make_engine("qwen3", torch.float32, True)

        def on_token(index: int, token: int, speculation: bool = speculation) -> None:
            heard[speculation].append((index, token))

        mixed = [
            replace(r, sampling=kinds[i % 6], columns=(likeliest,), on_token=on_token if i == 4 else None)
            for i, r in enumerate(requests)
        ]
        engine.generate(mixed)
        result[speculation] = engine.generate(mixed)
    assert_equal(result[True], result[False])
    assert heard[True] == heard[False]
    assert result[True][4].finish_reason == result[True][5].finish_reason == FinishReason.STOP


def test_a_row_suspended_between_passes_resumes_with_new_weights_as_without_guesses() -> None:
    requests = make_requests(groups=2, samples=3, sampling=REPEATING, shortest=4)
    result = {}
    for speculation in (True, False):
        engine = make_engine("qwen3", torch.float32, speculation, slots=16)
        engine.generate(requests)
        # At the tenth token of each row the weights change.
        short = [replace(request, sampling=replace(REPEATING, max_tokens=10, ends=False)) for request in requests]
        parts = [replace(part, finish_reason=FinishReason.ABORT) for part in engine.generate(short)]
        with torch.no_grad():
            engine.model.get_output_embeddings().weight.mul_(0.9)
        engine.publish(1)
        rest = [remaining_request(request, part) for request, part in zip(requests, parts, strict=True)]
        resumed = engine.generate([request for request in rest if request is not None])
        result[speculation] = [joined(pair) for pair in zip(parts, resumed, strict=True)]
    assert_equal(result[True], result[False])


def test_an_aborted_row_returns_the_tokens_of_its_last_pass_and_continues_equally() -> None:
    requests = make_requests(groups=1, samples=4, sampling=replace(REPEATING, ends=False), shortest=4)
    whole = make_engine("qwen3", torch.float32, False).generate(requests)
    engine = make_engine("qwen3", torch.float32, True)
    engine.generate(requests)
    for request in requests:
        engine.add(request)
    for _ in range(2):
        engine.step()
    parts = [engine.abort(request.uid) for request in requests]
    assert any(len(part.tokens) > 2 for part in parts)
    rest = [remaining_request(request, part) for request, part in zip(requests, parts, strict=True)]
    for part, resumed, row in zip(parts, engine.generate(rest), whole, strict=True):
        complete = joined([part, resumed])
        assert torch.equal(part.log_probs, row.log_probs[: len(part.tokens)])
        assert complete.tokens.tolist() == row.tokens.tolist()
        # The resumed row's earlier tokens were computed in one forward pass, which rounds otherwise.
        torch.testing.assert_close(complete.log_probs, row.log_probs, rtol=0, atol=3e-5)


def test_speculation_is_turned_off_by_the_word_that_yaml_reads_as_false(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for written, expected in (("off", "off"), ("'off'", "off"), ("auto", "auto"), ("on", "auto")):
        config = load_config(None, ["flow=grpo", f"model={tmp_path}", f"rollout.speculation={written}"])
        assert config.rollout.speculation == expected
    with pytest.raises(UserError, match=r"rollout\.speculation"):
        load_config(None, ["flow=grpo", f"model={tmp_path}", "rollout.speculation=always"])


def test_no_guesses_are_made_where_a_pass_costs_as_much_as_its_tokens() -> None:
    engine = make_engine("qwen3", torch.float32, True, slots=16)
    assert engine.speculation is not None
    engine.speculation.costs = lambda size, guessed: float(size) if not guessed else 2.0 * size
    engine.generate(make_requests(groups=4, samples=4, sampling=REPEATING))
    assert engine.speculated is not None and engine.speculated.drafted == 0
    assert engine.speculated.passes == engine.speculated.tokens


def test_guesses_whose_passes_cost_more_than_expected_lose_few_passes() -> None:
    engine = make_engine("qwen3", torch.float32, True, slots=16)
    speculation, passes, lost = engine.speculation, 0, 0.0
    assert speculation is not None
    record = speculation.observe

    def observe(size: int, rows: int, guesses: int, accepted: int, seconds: float, choosing: float) -> None:
        nonlocal passes, lost
        passes += 1
        lost += 4.0 - (rows + accepted) / rows if guesses else 0.0
        record(size, rows, guesses, accepted, 4.0 if guesses else 1.0, 0.0)

    speculation.observe = observe  # type: ignore[method-assign]
    for _ in range(2):
        engine.generate(make_requests(groups=8, samples=4, sampling=REPEATING))
    assert engine.speculated is not None and engine.speculated.drafted
    assert passes > 50 and lost < CREDIT + LOSS * passes + 4.0


@pytest.mark.parametrize(
    ("probabilities", "rows", "marginal", "expected"),
    [
        ([0.9] * 40, 16, 0.0, 40),  # flat costs: all guesses
        ([0.9] * 40, 16, 1.0, 0),  # costs of a token: none
        ([0.9] * 4, 12, 1.0, 4),  # in place of padding
        ([0.9] * 4 + [0.01] * 40, 12, 1.0, 4),
        ([0.01], 12, 0.0, 0),  # less than a gain that measurements can show
        ([], 12, 0.0, 0),
    ],
)
def test_so_many_guesses_are_taken_as_draw_most_tokens_per_second(
    probabilities: list[float], rows: int, marginal: float, expected: int
) -> None:
    def costs(size: int, guessed: bool) -> float:
        return 16 + marginal * (size - 16)

    drawn = [rows + sum(probabilities[:count]) for count in range(len(probabilities) + 1)]
    assert useful_guesses(drawn, rows, costs, 16) == expected


def test_looking_for_guesses_that_are_never_made_costs_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("qwen3", torch.float32, True, slots=16)
    speculation, looked, lost, passes = engine.speculation, False, 0.0, 0
    assert speculation is not None
    # Sixteen right guesses of each row would be worth it; the ones that are found are not.
    speculation.costs = lambda size, guessed: 12.0 if guessed else 1.0
    find, record = speculation.guesses.of, speculation.observe

    def of(slots: Tensor, states: SlotStates) -> tuple[Tensor, Tensor]:
        nonlocal looked
        looked = True
        return find(slots, states)

    def observe(size: int, rows: int, guesses: int, accepted: int, seconds: float, choosing: float) -> None:
        nonlocal looked, lost, passes
        assert not guesses
        lost, passes = lost + looked, passes + 1
        record(size, rows, guesses, accepted, 1.0, float(looked))
        looked = False

    monkeypatch.setattr(speculation.guesses, "of", of)
    monkeypatch.setattr(speculation, "observe", observe)
    engine.generate(make_requests(groups=8, samples=4, sampling=REPEATING))
    assert passes > 50 and 2 <= lost < CREDIT + LOSS * passes + 1.0


def test_a_size_is_judged_by_its_own_measurements_while_they_are_recent() -> None:
    costs = PassCosts()
    for _ in range(3):
        costs.add(16, False, 1.0)
    assert costs.seconds(16, False) == 1.0
    assert 1.0 < costs.seconds(32, True) < 2.0, "a size never tried is tried"
    for _ in range(3):
        costs.add(32, True, 3.0)
    assert costs.seconds(32, True) == 3.0
    for _ in range(300):
        costs.add(16, False, 1.0)
    assert costs.seconds(32, True) < 2.0, "after many passes it is tried again"


def states_with(response: Tensor, limit: int, draws: Tensor | None = None) -> SlotStates:
    """Return the states of two slots, each with a row that has drawn a response (T,), with its draws (T, 3)."""
    states = SlotStates.idle(2, torch.float32, torch.device("cpu"), draws=True)
    states.tokens = widened(states.tokens, limit)
    states.per_token = {name: widened(values, limit) for name, values in states.per_token.items()}
    states.tokens[:, : len(response)], states.drawn[:], states.limit[:] = response, len(response), limit
    if draws is not None:
        states.per_token[DRAWS][:, : len(response)] = draws
    return states


def remember(guesses: Guesses, request: Request, response: Tensor, draws: Tensor) -> None:
    """Begin and end a row that draws this response (T,), with its draws (T, 3)."""
    guesses.begin(0, request)
    guesses.end([0], states_with(response, len(response), draws))
    guesses.remember(request, response.numpy(), draws.numpy())


def test_the_random_number_says_which_of_the_tokens_that_came_before_comes_next() -> None:
    guesses, prompt = Guesses(2), torch.arange(5, 30)
    request = Request((0, 0, 0), prompt, SamplingParams())
    # Of the numbers in [0, 1), those up to 0.7 draw token 3, and those from there on token 8.
    for token, draw in ((3, [0.0, 0.7, 0.1]), (8, [0.7, 1.0, 0.9]), (3, [0.0, 0.7, 0.6])):
        remember(guesses, request, torch.tensor([token, 20]), torch.tensor([draw, [0.0, 1.0, 0.5]]))
    seen = set()
    for key in range(12):
        guesses.begin(1, request)
        states = states_with(torch.tensor([], dtype=torch.int64), limit=3)
        states.key[1] = key
        drafts, probabilities = guesses.of(torch.tensor([1]), states)
        expected = 3 if float(uniform(torch.tensor(key), 0)) < 0.7 else 8
        assert drafts[0, :2].tolist() == [expected, 20] and probabilities[0, 1] > 0.2
        seen.add(expected)
    assert seen == {3, 8}


def test_a_guess_is_what_followed_the_same_context_in_an_earlier_epoch() -> None:
    guesses, prompt = Guesses(2), torch.arange(5, 30)
    request = Request((0, 0, 0), prompt, SamplingParams())
    response = torch.tensor([7, 9, 7, 11, 13, 7, 15, 2])
    remember(guesses, request, response, torch.zeros(8, 3))
    guesses.begin(1, replace(request, uid=(0, 8, 0)))
    drafts, probabilities = guesses.of(torch.tensor([1]), states_with(torch.tensor([7, 9, 7]), limit=8))
    count = int((probabilities[0] > 0).sum())
    assert 1 <= count <= 4 and drafts[0, :count].tolist() == [11, 13, 7, 15][:count]


def test_a_resumed_rows_earlier_tokens_belong_to_its_response() -> None:
    guesses, prompt = Guesses(1), torch.arange(4)
    request = Request((0, 0, 0), torch.cat([prompt, torch.tensor([8, 9])]), SamplingParams(), continues=2)
    remember(guesses, request, torch.tensor([10]), torch.tensor([[0.2, 0.5, 0.4]]))
    ((kept, draws),) = guesses._earlier.of(prompt.numpy().tobytes())
    assert kept.tolist() == [8, 9, 10]
    assert draws.tolist() == torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.2, 0.5, 0.4]]).tolist()
    assert last_tokens(prompt.numpy()).tolist() == [-1] * (DEPTH - 4) + [0, 1, 2, 3]


def test_earlier_responses_of_the_prompts_used_longest_ago_are_forgotten() -> None:
    earlier = EarlierResponses(most_tokens=10)
    for name in (b"a", b"b", b"a", b"c"):
        earlier.add(name, np.arange(3), np.zeros((3, 3), np.float32))
    assert [len(earlier.of(name)) for name in (b"a", b"b", b"c")] == [2, 0, 1]
