"""Questions with answers that a rule can check, for a real language model on a CPU: `python examples/smollm2/tasks.py`.

sums   What is seven plus twelve? Write the answer as a number.                  the answer's last number is 19
told   What do bees do? Answer in capital letters. Use the word "river".       checks.py finds both instructions
       followed

Training and held-out questions have different pairs of numbers and different topics.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path
from typing import Any

from braidrl.data.conversions import gsm8k

FOLDER = Path("build/smollm2")
HELD_OUT = 80
NUMBERS = """
zero one two three four five six seven eight nine ten
eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty
"""
THINGS = """
bees, bread, rain, the moon, a bicycle, a doctor, winter, music, the sea, a library, coffee, horses, a bridge, trees,
sleep, a teacher, salt, a clock, birds, the sun, a garden, paper, fire, a kitchen, snow, cats, a train, money, the wind,
a farmer, milk, a city, shoes, stars, a dentist, books, a lamp, wool, a river, friends
"""
WORDS = ("river", "stone", "window", "apple", "silver", "morning", "letter", "yellow")
OPEN = (
    "Say something about {}.",
    "What do people like about {}?",
    "What do you know about {}?",
    "Tell a child about {}.",
    "Why is there a story about {}?",
    "What comes to your mind when you hear of {}?",
)
QUESTIONS = 800
"""Settings of letter counting."""
KEYS = ("answer", "reply", "text")

Examples = list[dict[str, Any]]


def sums(seed: int = 0) -> tuple[Examples, Examples]:
    """Return training and held-out questions: sums of two numbers from one to twenty, in words."""
    pairs = list(product(range(1, 21), repeat=2))
    random.Random(seed).shuffle(pairs)
    names = NUMBERS.split()
    asked = [
        {"prompt": f"What is {names[a]} plus {names[b]}? Write the answer as a number.", "answer": str(a + b)}
        for a, b in pairs
    ]
    return asked[HELD_OUT:], asked[:HELD_OUT]


def told(seed: int = 0, held_out: int = 8) -> tuple[Examples, Examples]:
    """Return training and held-out questions with two instructions each, about different things."""
    source = random.Random(seed)
    things = [thing.strip() for thing in THINGS.split(",")]
    source.shuffle(things)
    return instructed(things[held_out:], source), instructed(things[:held_out], source)


def instructed(things: Iterable[str], source: random.Random) -> Examples:
    """Return a question about each thing with each pair of the four kinds of instruction."""
    examples = []
    for thing, kinds in product(things, combinations(("json", "words", "capitals", "word"), 2)):
        key, count, word = source.choice(KEYS), source.randint(3, 8), source.choice(WORDS)
        ways = {
            "json": (f'Answer with a JSON object of the form {{"{key}": "..."}} and nothing else.', key),
            "words": (f"Answer in exactly {count} words.", count),
            "capitals": ("Write in capital letters only.", True),
            "word": (f'Use the word "{word}".', word),
        }
        prompt = " ".join([f"Say something about {thing}.", *(ways[kind][0] for kind in kinds)])
        examples.append({"prompt": prompt, "answer": "", "checks": {kind: ways[kind][1] for kind in kinds}})
    return examples


def brevity(seed: int = 0, held_out: int = 8) -> tuple[Examples, Examples]:
    """Return open training and held-out questions, about different things."""
    source = random.Random(seed)
    things = [thing.strip() for thing in THINGS.split(",")]
    source.shuffle(things)
    asked = [{"prompt": way.format(thing), "answer": ""} for thing in things for way in OPEN]
    first = held_out * len(OPEN)
    return asked[first:], asked[:first]


def letters(held_out: int = 48) -> tuple[Examples, Examples]:
    """Return training and held-out questions of reasoning-gym, as numbers."""
    asked = [{"prompt": f"question {seed}", "answer": "", "seed": seed} for seed in range(QUESTIONS)]
    return asked[held_out:], asked[:held_out]


def products(seed: int = 0) -> tuple[Examples, Examples]:
    """Return training and held-out products of two two-digit numbers, each after two worked examples with a
    calculator.
    """
    pairs = list(product(range(11, 100), repeat=2))
    random.Random(seed).shuffle(pairs)
    shown = [message for a, b in ((12, 34), (57, 21)) for message in with_calculator(a, b)]
    asked = [{"prompt": [*shown, with_calculator(a, b)[0]], "answer": str(a * b)} for a, b in pairs[:1000]]
    return asked[HELD_OUT:], asked[:HELD_OUT]


def with_calculator(a: int, b: int) -> list[dict[str, str]]:
    """Return the messages of a product: question, call, tool result, answer."""
    call = f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    said = [("user", f"What is {a} times {b}?"), ("assistant", call), ("tool", str(a * b)), ("assistant", str(a * b))]
    return [{"role": role, "content": content} for role, content in said]


def few_steps(record: dict[str, Any]) -> dict[str, Any] | str:
    """Return GSM8K's question if its answer takes at most two calculations, or else the reason why it is skipped."""
    count = record["answer"].count("<<")
    return gsm8k(record) if count <= 2 else f"{count} calculations"


def write(path: Path, examples: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))


def write_tasks() -> None:
    """Write each task's training and held-out questions."""
    tasks = {"sums": sums(), "told": told(), "brevity": brevity(), "letters": letters(), "products": products()}
    for name, (trained, held_out) in tasks.items():
        write(FOLDER / f"{name}.jsonl", trained)
        write(FOLDER / f"{name}_held_out.jsonl", held_out)


if __name__ == "__main__":
    write_tasks()
