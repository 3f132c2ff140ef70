"""Settings that a runtime ignores are accepted and reported."""

from __future__ import annotations

from typing import Any

import pytest

from braidrl.config import parse_config
from braidrl.runtimes.prepare.checks import without_effect
from tests.tiny import Workshop


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"streaming": {"dispatch_rows": 4}}, ["streaming.* has no effect: runtime=eager does not stream"]),
        ({"placement": "split"}, ["placement has no effect: only runtime=hybrid has pools, and this is runtime=eager"]),
        ({"workers": 2}, ["workers=2 has no effect: runtime=eager is this one process"]),
        ({"runtime": "streaming", "workers": 2}, ["workers=2 has no effect: the processes of runtime=streaming are"]),
        ({"cluster": {"launcher": "ray"}}, ["cluster.launcher=ray has no effect: only runtime=distributed has ranks"]),
        ({"trainer": {"max_staleness": 1}}, ["trainer.max_staleness=1 makes no row stale"]),
        ({"trainer": {"max_staleness": 1, "surplus": "keep"}}, []),
        ({"runtime": "streaming", "trainer": {"max_staleness": 1}}, []),
        ({"runtime": "hybrid", "workers": 2}, []),
        ({"runtime": "distributed", "workers": 2, "cluster": {"launcher": "local"}}, []),
        ({}, []),
    ],
)
def test_setting_ignored_by_runtime_is_reported(
    workshop: Workshop, sections: dict[str, Any], expected: list[str]
) -> None:
    lines = without_effect(parse_config(workshop.tree(**sections)))
    assert [line.startswith(words) for line, words in zip(lines, expected, strict=True)] == [True] * len(expected)


def test_an_ignored_setting_is_reported_before_the_first_step(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    workshop.run(workers=2, trainer={"steps": 1})
    said = capfd.readouterr().err
    assert "workers=2 has no effect" in said[: said.index("step 1")]
