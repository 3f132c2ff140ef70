"""Rows of popular data sets become examples, and rows that cannot are counted by reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braidrl.config import SourceConfig
from braidrl.data.conversions import CONVERSIONS, KNOWN, last_boxed
from braidrl.data.sources import Reading
from braidrl.errors import UserError
from braidrl.rewards.verifiers import gsm8k

Write = Callable[..., Path]


def dapo(answer: str, prompt: str = "What is 2+2?", index: str = "a") -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"Solve the following math problem.\n\n{prompt}"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def hh(chosen: str, rejected: str, question: str = "Why?") -> dict[str, Any]:
    started = f"\n\nHuman: Hello\n\nAssistant: Hi there.\n\nHuman: {question}\n\nAssistant:"
    return {"chosen": f"{started} {chosen}", "rejected": f"{started} {rejected}"}


def feedback(chosen: str, rejected: str, scores: tuple[float, float]) -> dict[str, Any]:
    user = {"role": "user", "content": "Write a haiku."}
    answers = [[user, {"role": "assistant", "content": text}] for text in (chosen, rejected)]
    about = {"prompt": "Write a haiku.", "prompt_id": "0", "messages": answers[0]}
    return {
        **about,
        "chosen": answers[0],
        "rejected": answers[1],
        "score_chosen": scores[0],
        "score_rejected": scores[1],
    }


CASES: dict[str, tuple[list[dict[str, Any]], list[tuple[str, str]], dict[str, int]]] = {
    "gsm8k": (
        [
            {"question": "How many?", "answer": "3 * 4 = <<3*4=12>>12\n#### 1,200"},
            {"question": "How many?", "answer": "twelve"},
        ],
        [("How many?", "1200")],
        {"the answer has no ####": 1},
    ),
    "math": (
        [
            {
                "problem": "p",
                "level": "Level 5",
                "type": "Algebra",
                "solution": r"So \boxed{1} or $\boxed{\frac{1}{2}}$.",
            },
            {"problem": "q", "level": "Level 1", "type": "Algebra", "solution": "It is two."},
            {"problem": "r", "solution": r"\boxed{3}", "answer": r"\sqrt 3", "subject": "Algebra", "level": 2},
        ],
        [("p", r"\frac{1}{2}"), ("r", r"\sqrt 3")],
        {"the solution has no \\boxed answer": 1},
    ),
    "dapo_math_17k": (
        [
            dapo("34"),
            dapo("34"),
            dapo("1,234.0", "b"),
            dapo(r"\boxed{-5}", "c"),
            dapo("$7$", "d"),
            dapo("1/2", "e"),
            dapo("2.5", "f"),
        ],
        [("2+2", "34"), ("b", "1234"), ("c", "-5"), ("d", "7")],
        {"the prompt was there before": 1, "the answer is no integer": 2},
    ),
    "deepscaler": (
        [{"problem": "p", "answer": "-\\frac{2}{3}", "solution": "s"}, {"problem": "q", "answer": "", "solution": ""}],
        [("p", "-\\frac{2}{3}")],
        {"the answer is empty": 1},
    ),
    "aime": (
        [
            {"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 33},
            {"id": 0, "problem": "q", "answer": "025", "url": "u", "year": "2024"},
            {"question": "r", "answer": "70"},
            {"question": "s", "answer": "1000"},
            dapo("204", "t"),
            dapo("204", "t"),
        ],
        [("p", "33"), ("q", "25"), ("r", "70"), ("t", "204")],
        {"the answer is no integer from 0 to 999": 1, "the prompt was there before": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_questions_of_public_sets_get_their_expected_answers(write_jsonl: Write, name: str) -> None:
    records, expected, left_out = CASES[name]
    reading = Reading(SourceConfig(path=write_jsonl(records), convert=name))
    result = [(example.prompt, example.answer) for example in reading]
    texts = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt, _ in result]
    assert [answer for _, answer in result] == [answer for _, answer in expected]
    assert all(expected_values in text for text, (expected_values, _) in zip(texts, expected, strict=True))
    assert dict(reading.left_out) == left_out


def test_converted_examples_have_the_verifiers_answer_and_a_trainable_solution(
    write_jsonl: Write,
) -> None:
    path = write_jsonl(CASES["gsm8k"][0][:1])
    (example,) = Reading(SourceConfig(path=path, convert="gsm8k"), responses=True)
    assert example.response is not None
    assert gsm8k(example.response, example.answer) and not gsm8k("#### 12", example.answer)


def test_a_conversation_as_text_becomes_messages_and_a_pair(write_jsonl: Write) -> None:
    other = hh("Because.", "No.")
    other["rejected"] = other["rejected"].replace("Hi there.", "Go away.")
    path = write_jsonl([hh("Because of this:\n\nit is.", "No."), other, hh("Same.", "Same.")])
    reading = Reading(SourceConfig(path=path, convert="hh"), pairs=True)
    (pair,) = reading
    said = [("user", "Hello"), ("assistant", "Hi there."), ("user", "Why?")]
    assert pair.prompt == [{"role": role, "content": text} for role, text in said]
    assert (pair.response, pair.rejected) == ("Because of this:\n\nit is.", "No.")
    assert dict(reading.left_out) == {
        "the two conversations differ before their last answer": 1,
        "both responses are the same": 1,
    }


def test_pairs_of_one_score_are_left_out(write_jsonl: Write) -> None:
    path = write_jsonl([feedback("Good", "Bad", (8.0, 3.0)), feedback("a", "b", (5.0, 5.0))])
    reading = Reading(SourceConfig(path=path, convert="ultrafeedback"), pairs=True)
    (pair,) = reading
    assert pair.prompt == [{"role": "user", "content": "Write a haiku."}]
    assert (pair.response, pair.rejected) == ("Good", "Bad")
    assert dict(reading.left_out) == {"both responses have the same score": 1}


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{a{b}c} d", "a{b}c"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed 12", None),
        (r"\boxed{1", None),
        ("1", None),
    ],
)
def test_the_last_box_is_read_with_the_braces_in_it(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


def test_every_known_data_set_has_a_conversion() -> None:
    assert {known.convert for known in KNOWN.values()} == set(CONVERSIONS)


def test_a_users_conversion_returns_an_example_or_a_reason(write_jsonl: Write, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def doubled(record):\n"
        "    if record['n'] % 2:\n"
        "        return 'the number is odd'\n"
        "    return {'prompt': f\"{record['n']}*2=\", 'answer': record['n'] * 2}\n"
        "def wrong(record):\n"
        "    return record['m']\n"
        "def nothing(record):\n"
        "    return None\n"
    )
    path = write_jsonl([{"n": n} for n in range(5)])
    reading = Reading(SourceConfig(path=path, convert=f"{tmp_path}/own.py:doubled"))
    assert [(e.prompt, e.answer, e.line) for e in reading] == [("0*2=", "0", 1), ("2*2=", "4", 3), ("4*2=", "8", 5)]
    assert dict(reading.left_out) == {"the number is odd": 2}
    with pytest.raises(UserError, match=r"line 1: .*own.py:wrong raised KeyError: 'm';"):
        list(Reading(SourceConfig(path=path, convert=f"{tmp_path}/own.py:wrong")))
    with pytest.raises(UserError, match=r"line 1: .*null; return a dict"):
        list(Reading(SourceConfig(path=path, convert=f"{tmp_path}/own.py:nothing")))
    with pytest.raises(UserError, match=r"'gsm8'. Did you mean 'gsm8k'"):
        Reading(SourceConfig(path=path, convert="gsm8"))
