"""Mathematical equivalence of answers, by math-verify. It has its own file because importing sympy takes long."""

import logging
import re
from typing import Any, NamedTuple

from math_verify import parse, verify

# It warns that its time is not limited. The pool limits it, without signals, which user code may use.
logging.getLogger("math_verify").setLevel(logging.ERROR)
BOX = re.compile(r"\\boxed\s*(\{|[^\s{}])")
JOINED = re.compile(r"[\s$]*(,|;|\band\b|\bor\b|\\text\{\s*(and|or)\s*\})[\s$]*(and\b|or\b)?[\s$]*")
"""The text between boxes that form one answer."""


def equivalent(response: str, answer: Any, *, boxed: bool = False) -> bool:
    r"""Return whether the response's final expression equals the answer: fractions, sets, intervals, matrices, equations.

    The answer may be LaTeX, `\boxed{}`, within dollar signs, or plain. If a response has several `\boxed{}`, the last one counts, together
    with boxes that a comma, "and" or "or" joins to it; for a set of n members the last n boxes may be the members. With `boxed` a response
    without `\boxed{}` is wrong. Raises ValueError if the answer cannot be parsed.
    """
    text = str(answer).strip()
    marked = re.search(r"\\boxed|(?<!\\)\$|\\\[|\\\(", text)
    # Without delimiters only plain numbers are found: 2 in 2\sqrt{3}.
    gold = parse(text if marked else f"\\boxed{{{text}}}", parsing_timeout=None)
    if not text or not gold:
        raise ValueError(f"the reference answer {text[:80]!r} cannot be read as mathematics")
    if boxed and "\\boxed" not in response:
        return False
    boxes = boxes_of(response)
    if len(boxes) < 2:
        return equals(gold, response)
    joined = 1
    while joined < len(boxes) and JOINED.fullmatch(response[boxes[-joined - 1].end : boxes[-joined].start]):
        joined += 1
    members = len(gold[0].args) if type(gold[0]).__name__ == "FiniteSet" else joined
    last = (" and ".join(f"\\boxed{{{box.content}}}" for box in boxes[-count:]) for count in {joined, members})
    return any(equals(gold, text) for text in last)


def equals(gold: Any, response: str) -> bool:
    """Return whether the expressions that math-verify finds in a response equal the answer's."""
    return bool(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))


class BoxedAnswer(NamedTuple):
    """A box in a text, with its start and end."""

    content: str
    start: int
    end: int


def boxes_of(text: str) -> list[BoxedAnswer]:
    r"""Return every complete `\boxed{...}` of a text, nested braces included, and of `\boxed 5`."""
    found = []
    for match in BOX.finditer(text):
        depth, end = int(match[1] == "{"), match.end()
        while depth and end < len(text):
            # An escaped brace, such as a set's, closes nothing.
            depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
            end += 1
        if not depth:
            found.append(BoxedAnswer(text[match.end() : end - 1] if match[1] == "{" else match[1], match.start(), end))
    return found
