"""`python -m examples.curriculum.sums`: writes sums of one to four digits, a careless teacher's answers, and an
untrained model.

47+85    7+5 4+8 . . =    12 13        columns from the right; the total of each, with what the one before it carries

A column and a total are a token each. The teacher writes 6 of 10 totals right: with one digit most sums, with four few.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples.small_model import make_tokenizer, write_jsonl, write_model

FOLDER = Path("build/curriculum")
MOST_DIGITS = 4
HELD_OUT, TRAINED = 50, 1000
"""Sums of each number of digits; of one digit there are 100, which repeat."""
RIGHT = 0.6
"""Probability of a right total in the teacher's answers."""

Columns = tuple[tuple[int, int], ...]


def columns(digits: int, source: random.Random) -> Columns:
    return tuple((source.randrange(10), source.randrange(10)) for _ in range(digits))


def totals(sum_columns: Columns, right: float, source: random.Random) -> str:
    """Return the totals of a sum's columns, each right with a probability, else off by one or two; the next one
    continues from what is written.
    """
    written: list[int] = []
    for a, b in sum_columns:
        total = a + b + (bool(written) and written[-1] > 9)
        mistake = 0 if source.random() < right else source.choice([-2, -1, 1, 2])
        written.append(min(max(total + mistake, 0), 19))
    return " ".join(map(str, written))


def example(sum_columns: Columns, source: random.Random) -> dict[str, str]:
    asked = [f"{a}+{b}" for a, b in sum_columns] + ["."] * (MOST_DIGITS - len(sum_columns))
    return {
        "prompt": " ".join([*asked, "="]),
        "answer": totals(sum_columns, 1.0, source),
        "response": totals(sum_columns, RIGHT, source),
        "digits": str(len(sum_columns)),
    }


def main() -> None:
    source = random.Random(0)
    held_out, trained = list[dict[str, str]](), list[dict[str, str]]()
    for digits in range(1, MOST_DIGITS + 1):
        asked = {columns(digits, source) for _ in range(HELD_OUT)}
        others = [pairs for pairs in (columns(digits, source) for _ in range(4 * TRAINED)) if pairs not in asked]
        held_out += [example(pairs, source) for pairs in sorted(asked)]
        trained += [example(pairs, source) for pairs in others[:TRAINED]]
    write_jsonl(FOLDER / "held_out.jsonl", held_out)
    write_jsonl(FOLDER / "sums.jsonl", trained)
    tokens = [f"{a}+{b}" for a in range(10) for b in range(10)] + [str(total) for total in range(20)]
    write_model(FOLDER / "untrained", make_tokenizer(tokens, ". ="), seed=0)


if __name__ == "__main__":
    main()
