"""Tokenising in batches: whoever waits for it sees how far it is."""

from __future__ import annotations

import time
from typing import Any

import pytest

from braidrl.data.tokenizing import with_progress


def test_a_bar_appears_only_when_tokenising_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    batches: list[list[Any]] = [[None, None], [None]]
    assert list(with_progress(batches, 3, "Tokenising")) == batches
    assert capsys.readouterr().err == ""
    shown = []
    for batch in with_progress(batches, 3, "Tokenising", after_s=0.01):
        shown.append(batch)
        time.sleep(0.02)
    assert shown == batches
    captured = capsys.readouterr()
    assert "Tokenising" in captured.err and "100%" in captured.err
    assert captured.out == ""
