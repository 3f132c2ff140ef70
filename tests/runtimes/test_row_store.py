"""The origin of rows is a message to the process that makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from braidrl.data.messages import pack_message, unpack_message
from braidrl.runtimes.row_store import Admission, HeldOut, Origin, Surplus


@pytest.mark.parametrize(
    "origin", [Admission([3, 4]), HeldOut("test"), HeldOut("test", prompts=1), Surplus(Path("/run/surplus-0.rows"))]
)
def test_an_origin_of_rows_is_the_same_after_a_message(origin: Origin) -> None:
    assert unpack_message(pack_message(origin), Admission | HeldOut | Surplus) == origin
