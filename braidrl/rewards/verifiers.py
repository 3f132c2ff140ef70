"""Braid's rule rewards. Each is a plain function whose parameters name the fields of a completion that it needs.

    prompt, response, answer, metadata, source    a completion's fields, by parameter name
    anything else                                 a setting, from the configuration's `params`

It returns right or wrong (bool), a score (float), or both (`Score`). Users' verifiers have the same form.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from braidrl.importing import PluginRegistry

VERIFIERS = PluginRegistry(
    "verifier",
    {
        "exact": "braidrl.rewards.verifiers:exact",
        "gsm8k": "braidrl.rewards.verifiers:gsm8k",
        "format": "braidrl.rewards.verifiers:follows_format",
        "math": "braidrl.rewards.math_equivalence:equivalent",
        "f1": "braidrl.rewards.verifiers:f1",
        "ifeval": "braidrl.rewards.instructions:ifeval",
        "code": "braidrl.rewards.programs:code",
        "judge": "braidrl.rewards.services:judge",
        "remote": "braidrl.rewards.services:remote",
    },
)


@dataclass(frozen=True)
class Score:
    """A verifier's result if a score alone does not tell right from wrong; `correct` may be None, undecided."""

    score: float
    correct: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the run's metrics, as `reward/NAME/`, averaged over rows."""


def exact(response: str, answer: Any, *, last_line: bool = False, pattern: str | None = None) -> bool:
    """Return whether the response equals the answer, ignoring white space at the ends.

    `last_line` compares only the last line that is not empty, `pattern` the last match of a regular expression in the remaining text: its
    first group, or the whole match without a group.
    """
    text = response.strip()
    if last_line:
        text = text.splitlines()[-1] if text else ""
    if pattern is not None:
        matches = list(re.finditer(pattern, text, re.DOTALL))
        if not matches:
            return False
        text = matches[-1].group(1 if matches[-1].re.groups else 0) or ""
    return text.strip() == str(answer).strip()


def follows_format(response: str, *, pattern: str) -> bool:
    """Return whether the whole response, without white space at the ends, matches a regular expression; `.` matches newlines too."""
    return re.fullmatch(pattern, response.strip(), re.DOTALL) is not None


def f1(response: str, answer: Any, *, correct_from: float = 1.0) -> Score:
    """Return 2PR/(P + R) over the words of response and answer, the highest for several answers (a list). SQuAD, arXiv 1606.05250.

    As in SQuAD's script, lower-case words are compared without punctuation and articles. The response is right from `correct_from` on.
    """
    score = max(word_overlap(response, str(one)) for one in (answer if isinstance(answer, list) else [answer]))
    return Score(score, correct=score >= correct_from)


def word_overlap(response: str, answer: str) -> float:
    """Return the F1 of two texts' words; 1 if neither has words, 0 if only one has."""
    given, wanted = map(squad_words, (response, answer))
    common = sum((Counter(given) & Counter(wanted)).values())
    if not given or not wanted or not common:
        return float(given == wanted)
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def squad_words(text: str) -> list[str]:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(?:a|an|the)\b", " ", bare).split()


# A minus after a digit is subtraction. Digits in a fraction, power, ratio or version are not numbers by themselves.
_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9)])[-−]\s?)?\$?\s?(?P<inner>(?<=\$)-)?(?<![0-9.,/^:])"
    r"(?P<digits>(?:[0-9][0-9,]*+(?:\.[0-9]++)?+|\.[0-9]++)(?:[eE][+-]?[0-9]{1,3})?+)(?!\s?[/^:]\s?[0-9])"
)


def gsm8k(response: str, answer: Any, *, flexible: bool = False) -> bool:
    """Return whether the number after the last `####` equals the reference's, a bare number or a GSM8K solution.

    Dollar signs, thousands commas, trailing punctuation and trailing zeros do not matter. A response without `####` is
    wrong; with `flexible` its last number counts. Raises ValueError if the reference holds no number.
    """
    reference = str(answer)
    expected = final_number(reference) if "####" in reference else last_number(reference)
    if expected is None:
        raise ValueError(f"the reference answer {reference[-80:]!r} holds no number")
    given = final_number(response)
    if given is None and flexible:
        given = last_number(response)
    return given == expected


def final_number(text: str) -> Decimal | None:
    """Return the first number on the line after the last `####`, or None."""
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    found = _NUMBER.search(lines[0]) if mark and lines else None
    return _value(found) if found else None


def last_number(text: str) -> Decimal | None:
    """Return the last number in the text, or None."""
    found = list(_NUMBER.finditer(text))
    return _value(found[-1]) if found else None


def _value(number: re.Match[str]) -> Decimal:
    magnitude = Decimal(number["digits"].replace(",", ""))
    return -magnitude if number["sign"] or number["inner"] else magnitude
