"""An environment's text continues the conversation by the chat template, and the engine sees exactly the row."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from braidrl.agents.player import EnvironmentPlayer
from braidrl.agents.trajectory import Limits, TurnSampling, trajectory_columns
from braidrl.agents.turns import MARK, Observation
from braidrl.data.chat import end_of_sequence_ids
from braidrl.data.rows import FinishReason, Rows
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import SamplingParams
from braidrl.engines.stepping import EngineReplica
from braidrl.errors import UserError
from braidrl.training.compute.attention import ATTENTION
from braidrl.training.compute.log_probs import linear_log_probs
from braidrl.training.compute.packed import pack
from tests.agents.chat import STYLES, Recorder, Script, make_chat_tokenizer, make_rows, turn_template
from tests.cases import soak_but
from tests.engines.tiny import SIZES

LIMIT = 400
LIMITS = Limits(at_once=8, timeout_s=30, max_turns=6, max_sequence_tokens=LIMIT)


@cache
def engine_parts(style: str | None) -> tuple[Any, Any]:
    """Return a tokenizer and a random model for it."""
    tokenizer = make_chat_tokenizer(style)
    torch.manual_seed(0)
    config = Qwen3Config(
        **{**SIZES, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "head_dim": 16}
    )
    config.max_position_embeddings = 512
    return tokenizer, AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)


class Told:
    """An environment that returns the given observations, one after each turn."""

    def __init__(self, said: list[Observation]) -> None:
        self.said = list(said)

    async def reset(self, example: dict[str, Any]) -> None:
        return None

    async def step(self, text: str) -> Observation:
        return self.said.pop(0) if self.said else Observation(done=True, reward=1.0)


def packed_log_probs(model: Any, rows: Rows) -> torch.Tensor:
    packed = pack(rows, torch.device("cpu"))
    with torch.no_grad():
        hidden = model.base_model(
            input_ids=packed.input_ids[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            sequences=packed.attention(),
        ).last_hidden_state[0]
        return linear_log_probs(hidden[packed.predictors], model.lm_head.weight, packed.targets, 1.0, False)[0]


texts = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=12)
observations = st.one_of(
    st.builds(Observation, texts),
    st.builds(
        lambda many: Observation([{"role": "tool", "content": t} for t in many]),
        st.lists(texts, min_size=1, max_size=3),
    ),
    st.builds(lambda text: Observation(text or "again", restart=True), texts),
)


@pytest.mark.parametrize("style", soak_but(["chatml", None], [*STYLES, None]))
@settings(max_examples=4)
@given(st.lists(st.lists(observations, max_size=4), min_size=1, max_size=4))
def test_a_row_holds_exactly_the_engines_tokens_with_trainings_log_probs(
    style: str | None, histories: list[list[Observation]]
) -> None:
    tokenizer, model = engine_parts(style)
    recorder = Recorder(EngineReplica(EmbeddedEngine(model, tokenizer, Decoding(16, LIMIT))))
    waiting = list(histories)
    episodes = EnvironmentPlayer(
        recorder,
        lambda: Told(waiting.pop(0)),
        turn_template(tokenizer),
        TurnSampling(SamplingParams(max_tokens=9), LIMIT),
        limits=LIMITS,
    )
    rows = make_rows(tokenizer, [f"question {i}" for i in range(len(histories))])
    played = asyncio.run(episodes.play(rows))
    for episode, uid in zip(played, rows.uids(), strict=True):
        assert episode.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and episode.failure is None
        trajectory, seen = episode, recorder.seen[uid]
        sequences = [s.tolist() for s in torch.tensor(trajectory.tokens).split(trajectory.sequence_lengths)]
        held: list[list[int]] = []
        for prompt, response in seen:
            if held and prompt[: len(held[-1])] == held[-1]:
                held.pop()
            held.append(prompt + response)
        assert held == sequences
        acted = [token for token, sampled in zip(trajectory.tokens, trajectory.actions, strict=True) if sampled]
        assert acted == [token for _, response in seen for token in response]
    table = rows.with_columns(trajectory_columns(played, LIMITS))
    torch.testing.assert_close(table["rollout_log_probs"].values, packed_log_probs(model, table), rtol=0, atol=1e-5)


@pytest.mark.parametrize("style", ["chatml", "headers"])
def test_a_row_equals_the_rendered_conversation_if_the_template_keeps_turns(
    style: str,
) -> None:
    tokenizer = make_chat_tokenizer(style)
    said = ["higher", [{"role": "tool", "content": "12"}, {"role": "tool", "content": "13"}], "lower"]
    turns = ["guess 5", "guess 77", "guess 123", "aab"]
    episodes = EnvironmentPlayer(
        Script(tokenizer, turns),
        lambda: Told([Observation(s) for s in said]),
        turn_template(tokenizer),
        TurnSampling(SamplingParams(), LIMIT),
        limits=LIMITS,
    )
    (episode,) = asyncio.run(episodes.play(make_rows(tokenizer, ["the number is"])))
    conversation = [{"role": "user", "content": "the number is"}]
    for turn, answer in zip(turns, [*said, ""], strict=True):
        conversation.append({"role": "assistant", "content": turn})
        conversation += [{"role": "user", "content": answer}] if isinstance(answer, str) else answer
    rendered = tokenizer.apply_chat_template(conversation[:-1], tokenize=False)
    assert tokenizer.decode(episode.tokens).rstrip() == rendered.rstrip()
    assert episode.turns == 4 and len(episode.sequence_lengths) == 1


def test_reasoning_that_the_template_would_drop_stays_where_the_engine_saw_it() -> None:
    tokenizer = make_chat_tokenizer("thinking")
    recorder = Recorder(Script(tokenizer, ["12 or 123?</think>guess 12", "123 then</think>guess 123"]))
    episodes = EnvironmentPlayer(
        recorder,
        lambda: Told([Observation("higher")]),
        turn_template(tokenizer),
        TurnSampling(SamplingParams(), LIMIT),
        limits=LIMITS,
    )
    (episode,) = asyncio.run(episodes.play(make_rows(tokenizer, ["the number"])))
    text = tokenizer.decode(episode.tokens)
    assert text == (
        "<|im_start|>user\nthe number<|im_end|>\n<|im_start|>assistant\n<think>\n12 or 123?</think>guess 12<|im_end|>\n"
        "<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n<think>\n123 then</think>guess 123<|im_end|>"
    )
    prompt, response = recorder.seen[0, 0, 0][1]
    assert prompt + response == episode.tokens


def test_a_cut_turn_is_closed_and_an_ended_turn_only_once() -> None:
    tokenizer = make_chat_tokenizer("chatml")
    template = turn_template(tokenizer)
    ended = tokenizer.decode(template.following("higher", tokenizer.eos_token_id).ids)
    cut = tokenizer.decode(template.following("higher", tokenizer("a")["input_ids"][0]).ids)
    assert ended == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert cut == "<|im_end|>" + ended


def test_a_turns_end_without_a_name_among_special_tokens_is_written_once() -> None:
    named = make_chat_tokenizer("chatml")
    # As of Gemma 3: the token is special, and the tokenizer's end of sequence is another one.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=named.backend_tokenizer, eos_token="<|im_start|>")
    tokenizer.chat_template, end = named.chat_template, named.eos_token_id
    template = turn_template(tokenizer)
    assert template.template.end_id == end and end in end_of_sequence_ids(tokenizer)
    assert template.following("higher", end) == turn_template(named).following("higher", end)


def test_an_extended_context_is_appended_and_a_new_context_starts_a_sequence() -> None:
    tokenizer = make_chat_tokenizer(None)

    def play(contexts: list[str]) -> tuple[list[int], str]:
        said = [Observation(context, restart=True) for context in contexts]
        episodes = EnvironmentPlayer(
            Script(tokenizer, ["b"]),
            lambda: Told(said),
            turn_template(tokenizer),
            TurnSampling(SamplingParams(), LIMIT),
            limits=LIMITS,
        )
        (episode,) = asyncio.run(episodes.play(make_rows(tokenizer, ["?!"])))
        return episode.sequence_lengths, tokenizer.decode(episode.tokens)

    assert play(["?!b<end>;;", "?!b<end>;;b<end>;"]) == ([11], "?!b<end>;;b<end>;b<end>")
    assert play(["?!b<end>;;", "??"]) == ([8, 4], "?!b<end>;;b<end>??b<end>")
    assert play(["?!", "?!b<end>;"]) == ([4, 7], "?!b<end>?!b<end>;b<end>")


def test_what_the_template_refuses_ends_the_run_with_one_line() -> None:
    tokenizer = make_chat_tokenizer("chatml")
    tokenizer.chat_template = "{{ raise_exception('only users') if messages | length > 1 else 'x' }}"
    with pytest.raises(UserError, match="refuses the messages: only users"):
        turn_template(tokenizer).following("higher", 1)
    with pytest.raises(UserError, match="stands for the assistant's turn"):
        turn_template(make_chat_tokenizer("chatml")).following(f"a {MARK}", 1)
