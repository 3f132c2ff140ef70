"""`python -m examples.guess_number.demo`: learn a game of several turns by playing it. Needs gem-llm.

gem's rules ──▶ \\boxed{5} ──▶ "the target number is higher than 5" ──▶ \\boxed{8} ──▶ ... at most four guesses
"""

from __future__ import annotations

import shutil
from pathlib import Path

from braidrl.config import load_config
from braidrl.runtimes.restarts import train
from examples.small_model import make_tokenizer, write_jsonl, write_model
from examples.two_stages import first_and_last

HERE = Path(__file__).parent
GUESSES = [f"\\boxed{{{number}}}" for number in range(1, 11)]
WORDS = """
Guess the number. You have to guess the number between 1 2 3 4 5 6 7 8 9 10 and (inclusive) within turns. At turn, you
guessed, and the target number is higher lower than. which has been already guessed before. outside range
specified. Enter your next guess.
"""


def prepare(folder: Path, seed: int) -> None:
    """Write data and an untrained model. Each line of data is one game, whose messages come from gem."""
    shutil.rmtree(folder, ignore_errors=True)
    write_jsonl(folder / "games.jsonl", ({"prompt": "Guess the number.", "game": game} for game in range(64)))
    write_model(folder / "model", make_tokenizer(GUESSES, WORDS), seed)


def main() -> None:
    folder = Path("build/guess_number")
    prepare(folder, seed=0)
    run = train(load_config(HERE / "config.yaml"))
    before, after = first_and_last(run, "eval/games/score_mean")
    print(f"The mean score of a game rose from {before:.2f} to {after:.2f}; sample games: {run / 'report.html'}")


if __name__ == "__main__":
    main()
