"""Verifiers of instructions, one for each kind; the example's field `checks` lists its instructions.

Words and letters are counted in the response's text, or in the text inside it if the response is a JSON object. An
instruction that the example does not give scores 0. With weights of a half and two instructions per question, the
reward is therefore the share of followed instructions.
"""

from __future__ import annotations

import json
import re
from typing import Any

MANY = 40
"""Number of words from which a response is no longer brief at all."""


def said(response: str) -> tuple[str | None, str]:
    """Return key and text of a JSON object that holds one text and nothing else; otherwise None and the response."""
    try:
        [(key, text)] = json.loads(response).items()
    except (ValueError, AttributeError):
        return None, response
    return (key, text) if isinstance(text, str) else (None, response)


def words_of(text: str) -> int:
    """Return the number of words in a text."""
    return len(re.findall(r"[\w'-]+", text))


def in_few_words(response: str) -> float:
    """Return 1 for one word and `1 / MANY` less for each further word; 0 for no words, and for `MANY` words or more."""
    words = words_of(response)
    return max(0.0, 1 - (words - 1) / MANY) if words else 0.0


def in_json(response: str, metadata: dict[str, Any]) -> bool:
    """Return whether the whole response is a JSON object with only the requested key."""
    return metadata["checks"].get("json", False) == said(response)[0]


def in_words(response: str, metadata: dict[str, Any]) -> bool:
    """Return whether the response has exactly the requested number of words."""
    return words_of(said(response)[1]) == metadata["checks"].get("words")


def in_capitals(response: str, metadata: dict[str, Any]) -> bool:
    """Return whether capitals were requested and the response has letters, all of them capitals."""
    return metadata["checks"].get("capitals", False) and said(response)[1].isupper()


def with_word(response: str, metadata: dict[str, Any]) -> bool:
    """Return whether the response contains the requested word, in lower or upper case."""
    word = metadata["checks"].get("word")
    return word is not None and re.search(rf"\b{word}\b", said(response)[1], re.IGNORECASE) is not None
