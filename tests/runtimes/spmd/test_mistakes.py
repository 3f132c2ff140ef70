"""Configurations that ranks cannot run are refused in one line before the start; an error in one rank ends all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.runtimes.evaluation import evaluate_model
from braidrl.runtimes.restarts import train
from tests.tiny import Workshop, braid

FAILING = Path(__file__).parents[1] / "failing.yaml"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"placement": "standalone"}, "runtime=distributed has all roles"),
        ({"roles": {"actor": {"generate_workers": 1}}}, "roles.actor.generate_workers is gone: every rank generates"),
        ({"trainer": {"surplus": "keep"}}, "trainer.surplus=keep"),
        ({"flow": "grop"}, "grpo"),
    ],
)
def test_impossible_placement_is_refused_before_start(workshop: Workshop, sections: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        train(parse_config(workshop.tree("refused", **{"runtime": "distributed", **sections})))
    assert "\n" not in str(caught.value)
    assert processes_of_ranks() == []


def test_a_world_of_another_size_than_configured_is_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="workers=3, but torchrun has started 2"):
        train(parse_config(workshop.tree("refused", runtime="distributed", workers=3)))


def test_failed_stage_names_rows_and_leaves_nothing(workshop: Workshop) -> None:
    process = braid("train", workshop.config_file("failing", flow=str(FAILING), runtime="distributed", workers=2))
    _, output = process.communicate(timeout=240)
    assert process.returncode == 1, output
    first, *rest = output[output.index("braid: ") :].removeprefix("braid: ").splitlines()
    # Four groups of four rows on two ranks: the second has those from group 2 on.
    assert re.match(r"rank 1 .*step 1, fails_on_rank_1 .*8 rows .*: \(0, 2, 0\) .*\(0, 2, 3\)", first)
    assert first.endswith("ValueError: no such luck") and any("failing.py" in line for line in rest)
    assert rest[-1] == "ValueError: no such luck", "the worker's own traceback is printed last"


def test_data_error_is_printed_once_in_one_line(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": "1+1="}\n')
    data = {"train": str(tmp_path / "bad.jsonl")}
    with pytest.raises(UserError, match=r"bad.jsonl") as caught:
        train(parse_config(workshop.tree("refused", runtime="distributed", workers=2, data=data)))
    assert "\n" not in str(caught.value)
    assert processes_of_ranks() == []


def test_ranks_evaluate_as_one_process_does(workshop: Workshop) -> None:
    data = {"eval": {"sums": str(workshop.data)}}
    sections: dict[str, Any] = {"data": data, "evaluation": {"samples": 2, "max_prompts": 5}}
    alone = evaluate_model(parse_config(workshop.tree(**sections)))
    together = evaluate_model(parse_config(workshop.tree(runtime="distributed", workers=2, **sections)))
    assert together == alone and alone["eval/sums/length_mean"] > 0


def processes_of_ranks() -> list[psutil.Process]:
    """Return the processes that this one has started and that still exist."""
    children = psutil.Process().children(recursive=True)
    running = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in running if "braidrl.cluster.child" in " ".join(child.cmdline())]
