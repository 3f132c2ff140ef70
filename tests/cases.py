"""Which cases of a test run in `make test`, and which only in `make soak`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def soak_but(kept: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Return cases for `pytest.mark.parametrize`, of which only those in `kept` are no soak tests."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.soak)
        for case in cases
    ]
