"""What `from braidrl import ...` offers."""

from __future__ import annotations

import subprocess
import sys

import braidrl
from braidrl.flow import Flow, loss
from braidrl.runtimes.session import Session


def test_what_an_algorithm_is_written_with_can_be_imported_from_the_top() -> None:
    assert (braidrl.Flow, braidrl.Session, braidrl.loss) == (Flow, Session, loss)
    assert all(getattr(braidrl, name) is not None for name in braidrl.__all__)


def test_the_package_itself_loads_nothing() -> None:
    asked = "import braidrl, sys; print(sorted({'torch', 'transformers', 'ray', 'pydantic'} & sys.modules.keys()))"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
