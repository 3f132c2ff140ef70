"""`from braidrl import ...` offers the public names, and class names are unique."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import braidrl
from braidrl.flow import Flow, loss
from braidrl.runtimes.session import Session
from tests.tiny import ROOT


def test_what_an_algorithm_is_written_with_can_be_imported_from_the_top() -> None:
    assert (braidrl.Flow, braidrl.Session, braidrl.loss) == (Flow, Session, loss)
    assert all(getattr(braidrl, name) is not None for name in braidrl.__all__)


def test_the_package_itself_loads_nothing() -> None:
    asked = "import braidrl, sys; print(sorted({'torch', 'transformers', 'ray', 'pydantic'} & sys.modules.keys()))"
    output = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


def test_no_two_classes_of_the_package_have_the_same_name() -> None:
    names = Counter(
        name for path in ROOT.glob("braidrl/**/*.py") for name in re.findall(r"^class (\w+)", path.read_text(), re.M)
    )
    assert [name for name, count in names.items() if count > 1] == []
