"""Checks of instruction following, by the names in IFEval's data (arXiv 2311.07911).

    {"instruction_id_list": ["keywords:existence", "punctuation:no_comma"], "kwargs": [{"keywords": ["tea"]}, {}]}

Each rule is a function of the response and the instruction's own arguments. Sentences are counted by their final punctuation, without a
language model. `language:response_language` would need one and is not supported.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from braidrl.rewards.verifiers import Score

Relation = Literal["at least", "less than"]
RULES: dict[str, Callable[..., bool]] = {}
"""The rules by instruction name; each is called with the response and the data's keyword arguments."""


def rule(name: str) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Register a rule under the name of its instruction."""

    def registered(function: Callable[..., bool]) -> Callable[..., bool]:
        RULES[name] = function
        return function

    return registered


def ifeval(response: str, prompt: Any, metadata: Mapping[str, Any], *, fraction: bool = False) -> Score:
    """Return whether the response follows all instructions of its example, or with `fraction` the share that it follows.

    The example has `instruction_id_list` and `kwargs` as in IFEval's data.

    Raises ValueError if the example has no instructions, or an unknown one.
    """
    names, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not names or len(names) != len(arguments or [{}] * len(names)):
        raise ValueError("the example has no `instruction_id_list`, or `kwargs` of another length")
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    followed = []
    for name, given in zip(names, arguments or [{}] * len(names), strict=True):
        if name not in RULES:
            raise ValueError(f"no rule is called {name!r}; there are {', '.join(RULES)}")
        # Data sets from the hub have all keys in each row; unused ones are null.
        known = {key: value for key, value in (given or {}).items() if value is not None}
        if name == "combination:repeat_prompt":
            known.setdefault("prompt_to_repeat", text)
        followed.append(bool(response.strip()) and RULES[name](response, **known))
    share = sum(followed) / len(followed)
    return Score(share if fraction else float(all(followed)), correct=all(followed))


def compared(count: int, relation: Relation, wanted: int) -> bool:
    """Return whether a count is `at least` or `less than` the wanted number."""
    return count >= wanted if relation == "at least" else count < wanted


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def paragraphs(text: str, separator: str) -> list[str]:
    return [part for part in re.split(separator, text) if part.strip()]


@rule("keywords:existence")
def has_keywords(response: str, keywords: list[str]) -> bool:
    return all(re.search(word, response, re.IGNORECASE) for word in keywords)


@rule("keywords:frequency")
def has_keyword_often(response: str, keyword: str, frequency: int, relation: Relation = "at least") -> bool:
    return compared(len(re.findall(keyword, response, re.IGNORECASE)), relation, frequency)


@rule("keywords:forbidden_words")
def has_no_forbidden_words(response: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{word}\b", response, re.IGNORECASE) for word in forbidden_words)


@rule("keywords:letter_frequency")
def has_letter_often(response: str, letter: str, let_frequency: int, let_relation: Relation = "at least") -> bool:
    return compared(response.lower().count(letter.lower()), let_relation, let_frequency)


@rule("length_constraints:number_words")
def has_words(response: str, num_words: int, relation: Relation = "at least") -> bool:
    return compared(len(words(response)), relation, num_words)


@rule("length_constraints:number_sentences")
def has_sentences(response: str, num_sentences: int, relation: Relation = "at least") -> bool:
    sentences = [part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+", response) if words(part)]
    return compared(len(sentences), relation, num_sentences)


@rule("length_constraints:number_paragraphs")
def has_paragraphs(response: str, num_paragraphs: int) -> bool:
    return len(paragraphs(response, r"\s?\*\*\*\s?")) == num_paragraphs


@rule("length_constraints:nth_paragraph_first_word")
def has_paragraph_that_begins(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    found = paragraphs(response, r"\n\n")
    if len(found) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    first = words(found[nth_paragraph - 1])
    return bool(first) and first[0].lower() == first_word.lower()


@rule("detectable_content:number_placeholders")
def has_placeholders(response: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", response)) >= num_placeholders


@rule("detectable_content:postscript")
def has_postscript(response: str, postscript_marker: str = "P.S.") -> bool:
    spaced = r"\s*".join(map(re.escape, postscript_marker.replace(" ", "")))
    return re.search(rf"{spaced}.*$", response, re.IGNORECASE | re.MULTILINE) is not None


@rule("detectable_format:number_bullet_lists")
def has_bullets(response: str, num_bullets: int) -> bool:
    return len(re.findall(r"^\s*(?:\*[^*].*|-.*)$", response, re.MULTILINE)) == num_bullets


@rule("detectable_format:number_highlighted_sections")
def has_highlights(response: str, num_highlights: int) -> bool:
    found = re.findall(r"\*\*[^\n*]*\*\*|\*[^\n*]*\*", response)
    return sum(bool(part.strip("* ")) for part in found) >= num_highlights


@rule("detectable_format:multiple_sections")
def has_sections(response: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", response)) >= num_sections


@rule("detectable_format:constrained_response")
def is_one_of_three(response: str) -> bool:
    return any(answer in response for answer in ("My answer is yes.", "My answer is no.", "My answer is maybe."))


@rule("detectable_format:json_format")
def is_json(response: str) -> bool:
    text = re.sub(r"^```(?:json)?|```$", "", response.strip(), flags=re.IGNORECASE)
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@rule("detectable_format:title")
def has_title(response: str) -> bool:
    return any(found.strip() for found in re.findall(r"<<([^\n]+?)>>", response))


@rule("combination:two_responses")
def has_two_responses(response: str) -> bool:
    parts = [part.strip() for part in response.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@rule("combination:repeat_prompt")
def repeats_prompt(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


@rule("startend:end_checker")
def ends_with(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@rule("startend:quotation")
def is_quoted(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@rule("change_case:capital_word_frequency")
def has_capital_words(response: str, capital_frequency: int, capital_relation: Relation = "at least") -> bool:
    return compared(sum(word.isupper() for word in words(response)), capital_relation, capital_frequency)


@rule("change_case:english_capital")
def is_in_capitals(response: str) -> bool:
    return response.isupper()


@rule("change_case:english_lowercase")
def is_in_small_letters(response: str) -> bool:
    return response.islower()


@rule("punctuation:no_comma")
def has_no_comma(response: str) -> bool:
    return "," not in response
