"""Mathematical equivalence of answers, by math-verify. In a file of its own because importing sympy takes long."""

import logging
import re
from typing import Any, NamedTuple

from math_verify import parse, verify

# It warns that nothing limits its time; the pool does, and without signals, which user code may want for itself.
logging.getLogger("math_verify").setLevel(logging.ERROR)
BOX = re.compile(r"\\boxed\s*(\{|[^\s{}])")
JOINED = re.compile(r"[\s$]*(,|;|\band\b|\bor\b|\\text\{\s*(and|or)\s*\})[\s$]*(and\b|or\b)?[\s$]*")
"""What stands between boxes that are one answer."""


def equivalent(response: str, answer: Any, *, boxed: bool = False) -> bool:
    r"""Return whether the response's final expression equals the answer: fractions, sets, intervals, matrices, equations.

    The answer may be LaTeX, `\boxed{}`, within dollar signs, or plain. Of several `\boxed{}` in a response the last one counts, with
    those that a comma, "and" or "or" joins to it; where the answer is a set of n members the last n may be the members. With `boxed` a
    response without `\boxed{}` is wrong. Raises ValueError when the answer cannot be read.
    """
    text = str(answer).strip()
    marked = re.search(r"\\boxed|(?<!\\)\$|\\\[|\\\(", text)
    # Without delimiters only plain numbers would be found in it: of 2\sqrt{3} the 2.
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
    """A box in a text, and where it begins and ends."""

    content: str
    start: int
    end: int


def boxes_of(text: str) -> list[BoxedAnswer]:
    r"""Return every complete `\boxed{...}` of a text, nested braces included, and of `\boxed 5`."""
    found = []
    for match in BOX.finditer(text):
        depth, end = int(match[1] == "{"), match.end()
        while depth and end < len(text):
            # An escaped brace, as of a set, closes nothing.
            depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
            end += 1
        if not depth:
            found.append(BoxedAnswer(text[match.end() : end - 1] if match[1] == "{" else match[1], match.start(), end))
    return found
