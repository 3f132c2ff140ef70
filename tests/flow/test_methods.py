"""Stages may be methods of a user's class for a role's workers; faulty classes are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from braidrl.errors import UserError
from braidrl.flow import Flow, Kind, actor, reward
from braidrl.flow.stages import make_stage
from braidrl.flow.yaml_form import from_yaml, to_yaml

METHODS = """
from braidrl.runtimes.hybrid.protocols import register

class Own:
    @register(protocol="THREE_D", reads=("tokens",), writes=("surprise",))
    def surprise(self, rows, scale=1.0): ...

    @register(protocol="ONE_TO_ALL")
    def silent(self): ...

    def plain(self, rows): ...
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(METHODS)
    return f"{tmp_path / 'own.py'}:Own"


def test_a_method_is_a_stage_with_the_columns_that_it_is_registered_with(own: str) -> None:
    stage = actor.method(f"{own}.surprise", scale=2.0)
    assert (stage.name, stage.kind, stage.reads, stage.writes) == (
        "actor.surprise",
        Kind.INFER,
        ("tokens",),
        ("surprise",),
    )
    flow = Flow("own", [actor.generate(), reward.verify(), stage])
    assert from_yaml(to_yaml(flow)) == flow


@pytest.mark.parametrize(
    ("method", "params", "words"),
    [
        ("plain", {}, r"Own .*'plain' .*@register\(protocol=...\) above"),
        ("suprise", {}, "Did you mean 'surprise'"),
        ("silent", {}, "writes columns, .* method none"),
        ("surprise", {"scal": 1.0}, "has no parameter 'scal'.*scale"),
    ],
)
def test_an_invalid_method_stage_is_a_user_error(own: str, method: str, params: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        make_stage(f"{own}.{method}", "actor", params)
    assert "\n" not in str(caught.value)


def test_a_type_without_a_method_is_a_user_error(own: str) -> None:
    with pytest.raises(UserError, match=r"write module:Class.method or path/to/file.py:Class.method"):
        make_stage(own, "actor")
