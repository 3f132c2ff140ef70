"""Settings that a runtime ignores are accepted and reported; moving averages that would not move are refused."""

from __future__ import annotations

from typing import Any

import pytest

from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.flow import Flow, actor, loss, reference
from braidrl.runtimes.prepare.checks import check_dtypes, without_effect
from tests.tiny import Workshop


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"streaming": {"dispatch_rows": 4}}, ["streaming.* has no effect under runtime=eager"]),
        ({"placement": "split"}, ["placement has no effect under runtime=eager"]),
        ({"workers": 2}, ["workers=2 has no effect under runtime=eager"]),
        ({"runtime": "streaming", "workers": 2}, ["workers=2 has no effect under runtime=streaming"]),
        ({"cluster": {"launcher": "ray"}}, ["cluster.launcher=ray has no effect under runtime=eager"]),
        ({"trainer": {"max_staleness": 1}}, ["trainer.max_staleness=1 makes no row stale"]),
        ({"trainer": {"max_staleness": 1, "surplus": "keep"}}, []),
        ({"runtime": "streaming", "trainer": {"max_staleness": 1}}, []),
        ({"runtime": "hybrid", "workers": 2}, []),
        ({"runtime": "distributed", "workers": 2, "cluster": {"launcher": "local"}}, []),
        ({"flow": "distillation"}, ["the teacher is the model itself"]),
        ({"flow": "distillation", "roles": {"reference": {"model": "teacher"}}}, []),
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
    output = capfd.readouterr().err
    assert "workers=2 has no effect" in output[: output.index("step 1")]


@pytest.mark.parametrize(
    ("decay", "dtype", "fault"),
    [
        (
            0.99,
            "bfloat16",
            r"reference.update: decay=0.99 .*bfloat16 .*write roles.reference.dtype=float32",
        ),
        (0.5, "bfloat16", None),
        (0.99, "float32", None),
        (1.0, "float32", r"old weights .*0 .*, got 1"),
    ],
)
def test_an_average_that_would_not_move_is_refused(
    workshop: Workshop, decay: float, dtype: str, fault: str | None
) -> None:
    config = parse_config(workshop.tree(dtype="bfloat16", roles={"reference": {"dtype": dtype}}))
    flow = Flow(
        "average", [actor.generate(), actor.update(loss=loss.sft()), reference.update(source=actor, decay=decay)]
    )
    if fault is None:
        check_dtypes(config, flow)
    else:
        with pytest.raises(UserError, match=fault):
            check_dtypes(config, flow)
