"""The built-in rule rewards. Each is a plain function whose parameters name the fields of a completion that it needs.

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
    """A verifier's result if a score alone does not determine right or wrong; `correct` may be None, undecided."""

    score: float
    correct: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the run's metrics, as `reward/NAME/`, averaged over rows."""


def exact(response: str, answer: Any, *, last_line: bool = False, pattern: str | None = None) -> bool:
    """Return True if the response equals the answer, ignoring white space at the ends.

    `last_line` compares only the last line that is not empty, `pattern` the last match of a regular expression in the
    remaining text: its first group, or the full match without a group.
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
    """Return True if the full response, without white space at the ends, matches a regular expression; `.` matches
    newlines too.
    """
    return re.fullmatch(pattern, response.strip(), re.DOTALL) is not None


def f1(response: str, answer: Any, *, correct_from: float = 1.0) -> Score:
    """Return 2PR/(P + R) over the words of response and answer, the highest for several answers (a list). SQuAD, arXiv
    1606.05250.

    As in SQuAD's script, lower-case words are compared without punctuation and articles. The response is right from
    `correct_from` on.
    """
    texts = [response, *map(str, answer if isinstance(answer, list) else [answer])]
    bare = (text.lower().translate(str.maketrans("", "", string.punctuation)) for text in texts)
    words, *references = (re.sub(r"\b(?:a|an|the)\b", " ", text).split() for text in bare)
    scores = []
    for reference in references:
        common = sum((Counter(words) & Counter(reference)).values())
        if common:
            precision, recall = common / len(words), common / len(reference)
            scores.append(2 * precision * recall / (precision + recall))
        else:  # also 1 if both have no words
            scores.append(float(words == reference))
    return Score(max(scores), correct=max(scores) >= correct_from)


# A minus after a digit is subtraction. Digits in a fraction, power, ratio or version are not separate numbers.
NUMBER = re.compile(
    r"(?P<sign>(?<![0-9)])[-−]\s?)?\$?\s?(?P<inner>(?<=\$)-)?(?<![0-9.,/^:])"
    r"(?P<digits>(?:[0-9][0-9,]*+(?:\.[0-9]++)?+|\.[0-9]++)(?:[eE][+-]?[0-9]{1,3})?+)(?!\s?[/^:]\s?[0-9])"
)


def gsm8k(response: str, answer: Any, *, flexible: bool = False) -> bool:
    """Return True if the number after the last `####` equals the reference's, a bare number or a GSM8K solution.

    Dollar signs, thousands commas, trailing punctuation and trailing zeros are ignored. A response without `####` is
    wrong; with `flexible` its last number counts. Raises ValueError if the reference holds no number.
    """
    reference = str(answer)
    expected = final_number(reference, marked="####" in reference)
    if expected is None:
        raise ValueError(f"the reference answer {reference[-80:]!r} holds no number")
    number = final_number(response)
    if number is None and flexible:
        number = final_number(response, marked=False)
    return number == expected


def final_number(text: str, marked: bool = True) -> Decimal | None:
    """Return the first number on the line after the last `####`, or with `marked=False` the last number in the text;
    None without one.
    """
    if marked:
        _, mark, rest = text.rpartition("####")
        text = next(iter(rest.strip().splitlines()), "") if mark else ""
    numbers = list(NUMBER.finditer(text))
    if not numbers:
        return None
    number = numbers[0 if marked else -1]
    magnitude = Decimal(number["digits"].replace(",", ""))
    return -magnitude if number["sign"] or number["inner"] else magnitude
