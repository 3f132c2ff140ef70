"""The origin of rows is a message to the process that makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from braidrl.runtimes.row_store import Admission, HeldOut, Origin, Surplus, as_order, origin_of


@pytest.mark.parametrize(
    "origin", [Admission([3, 4]), HeldOut("test"), HeldOut("test", prompts=1), Surplus(Path("/run/surplus-0.rows"))]
)
def test_an_origin_of_rows_is_the_same_after_a_message(origin: Origin) -> None:
    assert origin_of(as_order(origin)) == origin
