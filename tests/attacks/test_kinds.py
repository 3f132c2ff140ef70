"""Each kind of attack of README.md has at least three tries, each of them an entry of a table of these tests."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROWS = [
    line.strip("| \n").split(" | ")
    for line in Path(__file__).with_name("README.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| finding")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}")
def test_each_kind_of_attack_has_three_tries(row: list[str]) -> None:
    _, _, table, tries = row
    module, _, name = table.strip("`").partition(".")
    entries = {str(entry) for entry in getattr(importlib.import_module(f"tests.attacks.{module}"), name)}
    named = set(tries.split("; "))
    assert len(named) >= 3 and named <= entries, named - entries


def test_no_finding_is_left_out() -> None:
    assert {row[0] for row in ROWS} == {*map(str, range(1, 19)), "4b", "7b", "9b"}
