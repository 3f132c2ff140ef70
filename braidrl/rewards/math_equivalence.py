"""Mathematical equivalence of answers, by math-verify. It is a separate file because importing sympy takes long."""

import itertools
import json
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
from math_verify import parse, verify
from sympy.core.relational import Relational  # type: ignore[import-untyped]
from sympy.logic.boolalg import Boolean  # type: ignore[import-untyped]

from braidrl.data.conversions import boxed_parts

# It warns about a missing time limit. The pool limits the time, without signals, which user code may use.
logging.getLogger("math_verify").setLevel(logging.ERROR)
JOINED = re.compile(r"[\s$]*(,|;|\band\b|\bor\b|\\text\{\s*(and|or)\s*\})[\s$]*(and\b|or\b)?[\s$]*")
"""The text between boxes that form one answer."""

BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:\\[,;:! ]|~|\{,\}|\\thinspace|[\u2009\u202f\u00a0])(?=\d{3}(?!\d))")
"""Spaces and commas that LaTeX writes between thousands."""
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
"""A decimal whose last digits repeat."""
ENDLESS = re.compile(r"(?<![\d.])(\d*)\.(\d*?)(\d{1,12}?)\3+(?:\.\.\.|\u2026|\\(?:l|c)?dots)")
"""A decimal whose last digits repeat, with three dots."""
SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,3})(?![\w.])")
MIXED = re.compile(r"((?:[{=(,]|\A)\s*)([-+]?)(\d+)\s+(\d+)\s*/\s*(\d+)(?=\s*(?:[}),.$]|\\text|\Z))")
"""A whole number and a fraction beside it, as in 2 1/3."""
SIGNS = {
    "\u00b0": r"^\circ ",
    r"\langle": "(",
    r"\rangle": ")",
    r"\fbox": r"\boxed",
    r"\varnothing": r"\emptyset",
    **dict.fromkeys(("\u20ac", "\u00a3", "\u00a5", "\u20b9", r"\pounds", r"\euro", r"\yen"), " "),
}
"""Signs that math-verify does not read: degrees, angle brackets, currencies."""
FORMS = (
    (re.compile(r"</?(?:answer|think|solution)>"), "\n"),
    (re.compile(r"\\boxed\s*([^\s{}\\])"), r"\\boxed{\1}"),
    (re.compile(r"(?<=\d)\.(?=\s*[}$])"), ""),
    (re.compile(r"\\(sin|cos|tan)\s*\^\s*\{\s*-\s*1\s*\}"), r"\\arc\1"),
    (re.compile(r"~(?!\d{3}(?!\d))"), " "),
    (re.compile(r"\\text\s*\{\s*([\d:./,+-]+)\s*\}"), r"\1"),
    (re.compile(r"\\mathrm\s*\{\s*([ie])\s*\}"), r"\1"),
    (re.compile(r"\\([dt]?binom)\s*(\d)\s*(\d)"), r"\\\1{\2}{\3}"),
)
"""Forms of an answer that math-verify does not read, and how they are written for it."""
DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*\{?\d\}?)?)\s*(?:\{|\\left\(|\()?\s*"
    r"(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:\}|\\right\)|\))?"
)
"""A trigonometric function of degrees, which math-verify reads as radians."""
BASE = re.compile(r"[\s$]*[-+]?[\d.,\s]*\d\s*_\s*\{?\s*(\d+)\s*\}?[\s$.]*")
"""A number in another base, which math-verify reads without its base."""
MOST_DIGITS = 20_000
"""Digits of the largest number that is computed: sympy has no limit of time."""
POINTS = [sympy.Rational(n, 7) for n in (3, 16, 38, -5, -19, 2)]
AGREE, SMALL = 1e-9, 1e-3
"""Relative difference of equal numbers that are exact, and the size below which it is asked for."""
MOST_SYMBOLS, MOST_POINTS, FEWEST_POINTS = 4, 30, 3
"""Symbols of expressions that are compared by their values, and the points at which they are."""


def equivalent(response: str, answer: Any, *, boxed: bool = False) -> bool:
    """Return True if the response's final expression equals the answer: fractions, sets, intervals, matrices,
    equations.

    The answer may be LaTeX, `\boxed{}`, within dollar signs, or plain; each member of a list is right. If a response
    has several `\boxed{}`, the last one counts, together with boxes joined to it by a comma, "and" or "or"; for a set
    of n members the last n boxes may be the members. With `boxed` a response without `\boxed{}` is wrong. Raises
    ValueError if the answer cannot be parsed.
    """
    if isinstance(answer := alternatives(answer), list):
        if not answer:
            raise ValueError("the reference answer is an empty list")
        return any(equivalent(response, accepted, boxed=boxed) for accepted in answer)
    response, text = readable(response), readable(str(answer).strip())
    boxes = boxed_parts(response)
    answered = boxes[-1][0] if boxes else last_expression(response)
    gold_text = ([content for content, _, _ in boxed_parts(text)] or [text])[-1]
    if is_huge(gold_text) or is_huge(answered):
        return bool(boxes or not boxed) and same_power(gold_text, answered)
    marked = re.search(r"\\boxed|(?<!\\)\$|\\\[|\\\(", text)
    # Without delimiters only plain numbers are found: 2 in 2\sqrt{3}.
    gold = parse(text if marked else f"\\boxed{{{text}}}", parsing_timeout=None)
    if not text or not gold:
        raise ValueError(f"the reference answer {text[:80]!r} cannot be read as mathematics")
    if boxed and "\\boxed" not in response:
        return False
    answers = [response]
    if len(boxes) > 1:
        joined = 1
        while joined < len(boxes):
            (_, _, end), (_, start, _) = boxes[-joined - 1], boxes[-joined]
            if not JOINED.fullmatch(response[end:start]):
                break
            joined += 1
        members = len(gold[0].args) if type(gold[0]).__name__ == "FiniteSet" else joined
        answers = [" and ".join(f"\\boxed{{{box}}}" for box, _, _ in boxes[-count:]) for count in {joined, members}]
    return any(equal(gold, parse(accepted, parsing_timeout=None)) for accepted in answers)


def readable(text: str) -> str:
    """Return a text with its thousands joined, repeating decimals as fractions, angles of trigonometric functions in
    radians, and a single notation of the empty set.
    """

    def fraction(match: re.Match[str]) -> str:
        before, after, again = match.groups()
        below = 10 ** len(after) * (10 ** len(again) - 1)
        return rf"\frac{{{int(before + after + again) - int(before + after or 0)}}}{{{below}}}"

    for sign, read in SIGNS.items():
        text = text.replace(sign, read)
    for form, plain in FORMS:
        text = form.sub(plain, text)
    text = SCIENTIFIC.sub(r"\1 \\times 10^{\2}", MIXED.sub(r"\1\2(\3+\\frac{\4}{\5})", text))
    text = DEGREES.sub(r"\1(\2\\pi/180)", text)
    return ENDLESS.sub(fraction, REPEATING.sub(fraction, BETWEEN_DIGITS.sub("", text)))


POWER = re.compile(r"(\d+)\s*\^\s*")
FACTORIAL = re.compile(r"(\d+)\s*[})]?\s*!")
CHOSEN = re.compile(r"\\[dt]?binom\s*\{\s*(\d+)")
TAIL = 500
"""Characters at the end of a response without a box in which its answer stands."""


def powers_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield the base and the exponent, as text, of each power of a whole number."""
    for match in POWER.finditer(text):
        begin, depth, end = match.end(), 0, match.end()
        while end < len(text) and (depth or end == begin):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield int(match[1][:4000]), text[begin:end].removeprefix("{").removesuffix("}").strip()


def size_of(text: str) -> float:
    """Return the value of an exponent: a whole number, or a tower of powers; 1 for other text."""
    if text.isdecimal():
        return float(text) if len(text) < 300 else math.inf
    powers = list(powers_in(text))
    if not powers or not re.fullmatch(r"[\d\s^{}]+", text):
        return 1.0
    base, exponent = powers[0]
    digits = size_of(exponent) * math.log10(max(base, 1))
    return 10**digits if digits < 300 else math.inf


DELIMITED = re.compile(r"\$([^$]+)\$|\\\[(.*?)\\\]|\\\((.*?)\\\)", re.DOTALL)


def last_expression(response: str) -> str:
    """Return the last expression between delimiters of LaTeX; else the end of the text, whose `!` are no factorials."""
    tail = response[-TAIL:]
    delimited = [next(filter(None, match.groups()), "") for match in DELIMITED.finditer(tail)]
    return delimited[-1] if delimited else tail.replace("!", " ")


def is_huge(text: str) -> bool:
    """Return whether a text has a number that is too large to be computed."""
    digits = [size_of(exponent) * math.log10(max(base, 1)) for base, exponent in powers_in(text)]
    digits += [len(match[1]) * min(float(match[1][:20]), 1e20) for match in FACTORIAL.finditer(text)]
    digits += [float(match[1][:20]) * 0.3 for match in CHOSEN.finditer(text)]
    return any(count > MOST_DIGITS for count in digits)


LAYOUT = re.compile(r"\\(?:left|right|[,;:! ])|[$.]\s*\Z|\A\s*\$")


def same_power(expected: str, answered: str) -> bool:
    """Return whether two answers that cannot be computed are written alike, or are powers of one value."""
    bare = ["".join(LAYOUT.sub("", text).split()) for text in (expected, answered)]
    unbraced = [re.sub(r"\{(\w)\}", r"\1", text) for text in bare]
    if unbraced[0] == unbraced[1]:
        return True
    powers = [list(powers_in(text)) for text in bare]
    whole = all(re.fullmatch(r"\d+\^[\d^{}]+", text) for text in bare)
    # The exponents are computed where they are small enough; then logarithms tell.
    exponents = [pairs[0][1] for pairs in powers if pairs]
    if not whole or any(is_huge(text) for text in exponents):
        return False
    logs = [sympy.sympify(text.replace("^", "**").replace("{", "(").replace("}", ")")) for text in exponents]
    first, second = (log * sympy.log(pairs[0][0]) for log, pairs in zip(logs, powers, strict=True))
    return bool(abs(sympy.N(first / second - 1, 60)) < sympy.Float("1e-50"))


def base_of(parsed: Any) -> str | None:
    """Return the base in which a parsed number was written; None if it has none."""
    match = BASE.fullmatch(parsed[-1]) if parsed and isinstance(parsed[-1], str) else None
    return match and match[1]


def alternatives(answer: Any) -> Any:
    """Return the right answers of a list, or of a list of texts in JSON; any other answer unchanged."""
    if isinstance(answer, str) and re.match(r'\s*\[\s*"', answer):
        try:
            return json.loads(answer)
        except ValueError:
            return answer
    return answer


def equal(gold: Any, answer: Any) -> bool:
    """Return True if two parsed answers are equal.

    math-verify rounds numbers to six decimals, so exact numbers must also agree relatively. It takes a symbol for any
    complex number, so expressions are also compared where both are real. Numbers in two bases differ. Inequalities
    equal the interval that they describe. The same text is equal, even if its value is too large to compute.
    """
    if len({base_of(gold), base_of(answer)} - {None}) > 1:
        return False
    if gold and answer and isinstance(gold[-1], str) and gold[-1] == answer[-1]:
        return True
    expected, answered = (parts[0] if parts and isinstance(parts[0], sympy.Expr) else None for parts in (gold, answer))
    right = verify(gold, answer, timeout_seconds=None)
    if expected is None or answered is None:
        return bool(right) or equal_regions(gold, answer)
    if right:
        exact = all(part.is_number and not part.has(sympy.Float) for part in (expected, answered))
        return not exact or not all(map(is_small, (expected, answered))) or near(expected, answered)
    return equal_complex(expected, answered) or equal_where_real(expected, answered)


def equal_regions(gold: Any, answer: Any) -> bool:
    """Return True if an interval or another set, and inequalities of one symbol, describe the same numbers."""
    regions = [region(parts[0]) for parts in (gold, answer) if parts]
    if len(regions) < 2 or None in regions or not any(isinstance(parts[0], sympy.Set) for parts in (gold, answer)):
        return False
    first, second = regions
    return bool(first.is_subset(second) and second.is_subset(first))


def region(part: Any) -> Any:
    """Return the set described by a set, or by inequalities of one symbol joined by "and" or "or"; otherwise None."""
    if isinstance(part, sympy.Eq) and isinstance(part.rhs, sympy.Set):
        return part.rhs
    if (
        isinstance(part, sympy.FiniteSet)
        and part.args
        and all(isinstance(relation, Relational) for relation in part.args)
    ):
        part = sympy.Or(*part.args)
    if isinstance(part, Boolean) and len(part.free_symbols) == 1:
        return part.as_set()
    return part if isinstance(part, sympy.Set) else None


def is_small(number: Any) -> bool:
    """Return True if rounding to six decimals may make a number equal to another one."""
    return bool((abs(sympy.N(number.doit(), 15)) < SMALL) == True)  # noqa: E712 (sympy's truth)


def near(expected: Any, answered: Any) -> bool:
    """Return True if two numbers agree to a relative difference of `AGREE`."""
    expected, answered = expected.doit(), answered.doit()
    difference, bound = abs(sympy.N(expected - answered, 15)), AGREE * abs(sympy.N(expected, 15))
    return bool(expected == answered or (difference <= bound) == True)  # noqa: E712 (sympy's truth)


def equal_complex(expected: Any, answered: Any) -> bool:
    """Return True if two expressions, one of which has the letter i, are the same complex number."""
    units = {symbol: sympy.I for symbol in expected.free_symbols | answered.free_symbols if symbol.name == "i"}
    expected, answered = expected.subs(units), answered.subs(units)
    return bool(units) and expected.is_number and answered.is_number and near(expected, answered)


def equal_where_real(expected: Any, answered: Any) -> bool:
    """Return True if two expressions of the same symbols have equal values at several points at which both are real."""
    symbols = sorted(expected.free_symbols, key=str)
    if not symbols or expected.free_symbols != answered.free_symbols or len(symbols) > MOST_SYMBOLS:
        return False
    compared = 0
    for values in itertools.islice(itertools.permutations(POINTS, len(symbols)), MOST_POINTS):
        at = dict(zip(symbols, values, strict=True))
        first, second = (sympy.N(part.subs(at), 15) for part in (expected, answered))
        if first.is_real and second.is_real:
            compared += 1
            if not near(first, second):
                return False
    return compared >= FEWEST_POINTS
