"""A verifier that a random model passes about half of the time."""

from __future__ import annotations

from typing import Any


def even(response: str, answer: Any) -> bool:
    """Return whether the first symbol of the response is an even digit or a sign."""
    return response[:1] in "02468+"
