"""Mathematical equivalence of answers, by math-verify. In a file of its own because importing sympy takes long."""

import logging
import re
from typing import Any

from math_verify import parse, verify

# It warns that nobody limits its time; the pool does, and without signals, which user code may want for itself.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def equivalent(response: str, answer: Any, *, boxed: bool = False) -> bool:
    r"""Return whether the response's final expression equals the answer: fractions, sets, intervals, matrices, equations.

    The answer may be LaTeX, `\boxed{}`, within dollar signs, or plain. With `boxed` a response without `\boxed{}` is
    wrong. Raises ValueError when the answer cannot be read.
    """
    text = str(answer).strip()
    marked = re.search(r"\\boxed|(?<!\\)\$|\\\[|\\\(", text)
    # Without delimiters only plain numbers would be found in it: of 2\sqrt{3} the 2.
    gold = parse(text if marked else f"\\boxed{{{text}}}", parsing_timeout=None)
    if not text or not gold:
        raise ValueError(f"the reference answer {text[:80]!r} cannot be read as mathematics")
    if boxed and "\\boxed" not in response:
        return False
    return bool(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
