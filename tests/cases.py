"""Choose the cases of a test that `make test` runs; `make soak` runs the others."""

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
