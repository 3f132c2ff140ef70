"""Whether a response does as it was told, one verifier for each kind of instruction; the example's `checks` say what it was told.

Words and letters are counted in what the response says: in the text of a JSON object where it is one. An instruction that the
example does not give scores 0, so that with weights of a half and two instructions for each question the reward is the share of
the instructions that were followed.
"""

from __future__ import annotations

import json
import re
from typing import Any

MANY = 40
"""Words from which on a response is not brief at all."""


def said(response: str) -> tuple[str | None, str]:
    """Return the key and the text of a JSON object that holds one text and nothing else; where it is none, None and the response."""
    try:
        [(key, text)] = json.loads(response).items()
    except (ValueError, AttributeError):
        return None, response
    return (key, text) if isinstance(text, str) else (None, response)


def words_of(text: str) -> int:
    """Return how many words a text has."""
    return len(re.findall(r"[\w'-]+", text))


def in_few_words(response: str) -> float:
    """Return 1 for one word, less by `1 / MANY` for each word more, and 0 for none and from `MANY` words on."""
    words = words_of(response)
    return max(0.0, 1 - (words - 1) / MANY) if words else 0.0


def in_json(response: str, metadata: dict[str, Any]) -> bool:
    """Return whether the whole response is a JSON object with the one key that was asked for."""
    return metadata["checks"].get("json", False) == said(response)[0]


def in_words(response: str, metadata: dict[str, Any]) -> bool:
    """Return whether it says exactly as many words as were asked for."""
    return words_of(said(response)[1]) == metadata["checks"].get("words")


def in_capitals(response: str, metadata: dict[str, Any]) -> bool:
    """Return whether capitals were asked for and it says letters, all of them capitals."""
    return metadata["checks"].get("capitals", False) and said(response)[1].isupper()


def with_word(response: str, metadata: dict[str, Any]) -> bool:
    """Return whether it says the word that was asked for, in small letters or capitals."""
    word = metadata["checks"].get("word")
    return word is not None and re.search(rf"\b{word}\b", said(response)[1], re.IGNORECASE) is not None
