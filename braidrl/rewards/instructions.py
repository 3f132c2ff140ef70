"""Checks of instruction following, by the names in IFEval's data (arXiv 2311.07911).

{"instruction_id_list": ["keywords:existence", "punctuation:no_comma"], "kwargs": [{"keywords": ["tea"]}, {}]}

Each rule is a function of the response and the instruction's arguments. Sentences are counted by their final
punctuation, without a language model. `language:response_language` would need a language model and is not supported.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from braidrl.data.chat import text_of
from braidrl.rewards.verifiers import Score

Relation = Literal["at least", "less than"]
WORD = re.compile(r"\w+")


def ifeval(response: str, prompt: Any, metadata: Mapping[str, Any], *, fraction: bool = False) -> Score:
    """Return True if the response follows all instructions of its example, or with `fraction` the share that it
    follows.

    The example has `instruction_id_list` and `kwargs` as in IFEval's data. Raises ValueError for none, or an unknown
    one.
    """
    names, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not names or len(names) != len(arguments or [{}] * len(names)):
        raise ValueError("the example has no `instruction_id_list`, or `kwargs` of another length")
    text = prompt if isinstance(prompt, str) else text_of(prompt[-1]["content"])
    followed = []
    for name, settings_given in zip(names, arguments or [{}] * len(names), strict=True):
        if name not in RULES:
            raise ValueError(f"no rule is called {name!r}; there are {', '.join(RULES)}")
        # Data sets from the hub have all keys in each row; unused ones are null.
        settings = {key: value for key, value in (settings_given or {}).items() if value is not None}
        if name == "combination:repeat_prompt":
            settings.setdefault("prompt_to_repeat", text)
        followed.append(bool(response.strip()) and RULES[name](response, **settings))
    share = sum(followed) / len(followed)
    return Score(share if fraction else float(all(followed)), correct=all(followed))


def compared(count: int, relation: Relation, limit: int) -> bool:
    """Return True if a count is `at least` or `less than` the limit."""
    return count >= limit if relation == "at least" else count < limit


def begins(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return True if there are exactly `num_paragraphs` paragraphs and one begins with a word."""
    paragraphs = [part for part in response.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    first = WORD.search(paragraphs[nth_paragraph - 1])
    return first is not None and first[0].lower() == first_word.lower()


def is_json(response: str) -> bool:
    try:
        json.loads(re.sub(r"^```(?:json)?|```$", "", response.strip(), flags=re.IGNORECASE))
    except ValueError:
        return False
    return True


RULES: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda response, keywords: all(re.search(word, response, re.I) for word in keywords),
    "keywords:frequency": lambda response, keyword, frequency, relation="at least": compared(
        len(re.findall(keyword, response, re.I)), relation, frequency
    ),
    "keywords:forbidden_words": lambda response, forbidden_words: (
        not any(re.search(rf"\b{word}\b", response, re.I) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda response, letter, let_frequency, let_relation="at least": compared(
        response.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "length_constraints:number_words": lambda response, num_words, relation="at least": compared(
        len(WORD.findall(response)), relation, num_words
    ),
    "length_constraints:number_sentences": lambda response, num_sentences, relation="at least": compared(
        sum(bool(WORD.search(part)) for part in re.split(r"(?<=[.!?])[\"')\]]*\s+", response)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": lambda response, num_paragraphs: (
        sum(bool(part.strip()) for part in re.split(r"\s?\*\*\*\s?", response)) == num_paragraphs
    ),
    "length_constraints:nth_paragraph_first_word": begins,
    "detectable_content:number_placeholders": lambda response, num_placeholders: (
        len(re.findall(r"\[.*?\]", response)) >= num_placeholders
    ),
    "detectable_content:postscript": lambda response, postscript_marker="P.S.": bool(
        re.search(r"\s*".join(map(re.escape, postscript_marker.replace(" ", ""))), response, re.I)
    ),
    "detectable_format:number_bullet_lists": lambda response, num_bullets: (
        len(re.findall(r"^\s*(?:\*[^*].*|-.*)$", response, re.M)) == num_bullets
    ),
    "detectable_format:number_highlighted_sections": lambda response, num_highlights: (
        sum(bool(part.strip("* ")) for part in re.findall(r"\*\*[^\n*]*\*\*|\*[^\n*]*\*", response)) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda response, section_spliter, num_sections: (
        len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", response)) >= num_sections
    ),
    "detectable_format:constrained_response": lambda response: any(
        f"My answer is {answer}." in response for answer in ("yes", "no", "maybe")
    ),
    "detectable_format:json_format": is_json,
    "detectable_format:title": lambda response: any(map(str.strip, re.findall(r"<<([^\n]+?)>>", response))),
    "combination:two_responses": lambda response: (
        len(parts := [part.strip() for part in response.split("******")]) == 2 and all(parts) and parts[0] != parts[1]
    ),
    "combination:repeat_prompt": lambda response, prompt_to_repeat: (
        response.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda response, end_phrase: (
        response.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda response: len(text := response.strip()) > 1 and text[0] == text[-1] == '"',
    "change_case:capital_word_frequency": lambda response, capital_frequency, capital_relation="at least": compared(
        sum(map(str.isupper, WORD.findall(response))), capital_relation, capital_frequency
    ),
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda response: "," not in response,
}
"""The rules by instruction name; each is called with the response and the data's keyword arguments."""
