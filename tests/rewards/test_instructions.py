"""Each instruction of IFEval is followed by one response and not by another, and the share of them is the score."""

from __future__ import annotations

import pytest

from braidrl.rewards.instructions import RULES, ifeval

CASES = {
    "keywords:existence": ({"keywords": ["tea", "milk"]}, "Milk in my tea.", "Tea alone."),
    "keywords:frequency": ({"keyword": "tea", "frequency": 2}, "Tea, tea.", "Tea."),
    "keywords:forbidden_words": ({"forbidden_words": ["tea"]}, "A steamer.", "Tea is fine."),
    "keywords:letter_frequency": (
        {"letter": "e", "let_frequency": 3, "let_relation": "less than"},
        "Ten e",
        "Eleven e",
    ),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "less than"},
        "Only 3.5 of them.",
        "One. Two!",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        'One.\n\n"then" two.',
        "Then one.\n\nTwo.",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] of [street]", "[name]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Text.\nP. S. more", "PS more"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* one\n- two", "* one\n**two**"),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\nSection 2",
        "Section 1",
    ),
    "detectable_format:constrained_response": ({}, "My answer is maybe.", "Maybe."),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<Of tea>>\nText", "<< >> Text"),
    "combination:two_responses": ({}, "one ****** two", "one ****** one"),
    "combination:repeat_prompt": ({}, "what is tea? It is a plant.", "It is a plant."),
    "startend:end_checker": ({"end_phrase": "The end."}, "Text. the END. ", "The end. Text"),
    "startend:quotation": ({}, ' "all of it" ', '"'),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "less than"},
        "ONE two",
        "ONE TWO",
    ),
    "change_case:english_capital": ({}, "ALL 1", "All"),
    "change_case:english_lowercase": ({}, "all 1", "All"),
    "punctuation:no_comma": ({}, "one; two", "one, two"),
}


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_tells_what_follows_it_from_what_does_not(name: str) -> None:
    given, follows, does_not = CASES[name]
    # As data of the hub are: keys of other instructions are null.
    example = {"instruction_id_list": [name], "kwargs": [given | {"other": None}]}
    results = [
        ifeval(response, [{"role": "user", "content": "What is tea?"}], example)
        for response in (follows, does_not, " ")
    ]
    assert [(one.score, one.correct) for one in results] == [(1.0, True), (0.0, False), (0.0, False)]


def test_the_score_is_all_or_with_fraction_the_share() -> None:
    example = {"instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase", "startend:quotation"]}
    assert ifeval("no comma", "p", example).score == 0
    partly = ifeval("no comma", "p", example, fraction=True)
    assert (partly.score, partly.correct) == (2 / 3, False)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({}, "has no `instruction_id_list`"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}, "`kwargs` of another length"),
        (
            {"instruction_id_list": ["language:response_language"]},
            "'language:response_language'; there are keywords:",
        ),
    ],
)
def test_an_example_that_cannot_be_checked_is_an_error_and_not_wrong(example: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ifeval("text", "p", example)
