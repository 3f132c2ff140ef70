"""Mathematical equivalence of answers, by math-verify. It has its own file because importing sympy takes long."""

import logging
import re
from typing import Any

from math_verify import parse, verify

from braidrl.data.conversions import boxed_parts

# It warns that its time is not limited. The pool limits it, without signals, which user code may use.
logging.getLogger("math_verify").setLevel(logging.ERROR)
JOINED = re.compile(r"[\s$]*(,|;|\band\b|\bor\b|\\text\{\s*(and|or)\s*\})[\s$]*(and\b|or\b)?[\s$]*")
"""The text between boxes that form one answer."""


def equivalent(response: str, answer: Any, *, boxed: bool = False) -> bool:
    r"""Return whether the response's final expression equals the answer: fractions, sets, intervals, matrices,
    equations.

    The answer may be LaTeX, `\boxed{}`, within dollar signs, or plain. If a response has several `\boxed{}`, the last
    one counts, together with boxes that a comma, "and" or "or" joins to it; for a set of n members the last n boxes may
    be the members. With `boxed` a response without `\boxed{}` is wrong. Raises ValueError if the answer cannot be
    parsed.
    """
    text = str(answer).strip()
    marked = re.search(r"\\boxed|(?<!\\)\$|\\\[|\\\(", text)
    # Without delimiters only plain numbers are found: 2 in 2\sqrt{3}.
    gold = parse(text if marked else f"\\boxed{{{text}}}", parsing_timeout=None)
    if not text or not gold:
        raise ValueError(f"the reference answer {text[:80]!r} cannot be read as mathematics")
    if boxed and "\\boxed" not in response:
        return False
    boxes, given = boxed_parts(response), [response]
    if len(boxes) > 1:
        joined = 1
        while joined < len(boxes):
            (_, _, end), (_, start, _) = boxes[-joined - 1], boxes[-joined]
            if not JOINED.fullmatch(response[end:start]):
                break
            joined += 1
        members = len(gold[0].args) if type(gold[0]).__name__ == "FiniteSet" else joined
        given = [" and ".join(f"\\boxed{{{box}}}" for box, _, _ in boxes[-count:]) for count in {joined, members}]
    return any(verify(gold, parse(one, parsing_timeout=None), timeout_seconds=None) for one in given)
