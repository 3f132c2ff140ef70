"""Comparison of what a program prints with what a test expects."""

import itertools
import re

NUMBER = re.compile(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?")
DECIMAL = re.compile(r"[-+]?\d*\.\d+(?:[eE][-+]?\d+)?")
NEAR = 1e-6
"""Difference of decimals that counts as rounding, relative to numbers above 1."""


def lines_of(text: str | None) -> list[str]:
    """Return the lines of an output without trailing white space and without empty lines at the end."""
    return [] if text is None else [line.rstrip() for line in text.rstrip().split("\n")]


def same_output(printed: str | None, expected: str) -> bool:
    """Return whether an output is the expected one, up to white space at line ends and the rounding of decimals."""
    lines, right = lines_of(printed), lines_of(expected)
    if lines == right:
        return printed is not None
    words = [[line.split() for line in part] for part in (lines, right)]
    return (
        printed is not None
        and [len(line) for line in words[0]] == [len(line) for line in words[1]]
        and all(map(same_word, itertools.chain(*words[0]), itertools.chain(*words[1])))
    )


def same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    return (
        bool(DECIMAL.fullmatch(expected)) and bool(NUMBER.fullmatch(printed)) and near(float(printed), float(expected))
    )


def near(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR * max(1.0, abs(other))
