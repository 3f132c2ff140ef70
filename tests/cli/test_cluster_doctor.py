"""A problem of a cluster is reported with its node; `tests/runtimes/streaming/test_on_ray.py` checks real nodes."""

from __future__ import annotations

from pathlib import Path

from braidrl.cli.doctor import NodeReport, paths_of, problems, unusable
from braidrl.config import load_config

GOOD = {"versions": {"python": "3.11.7", "torch": "2.11.0"}, "devices": ["H100"] * 8}


def test_each_problem_names_its_node_and_what_to_do() -> None:
    nodes = [NodeReport(f"n{number}", **GOOD) for number in range(4)]  # type: ignore[arg-type]
    assert problems(nodes) == []
    nodes[1].versions = {"python": "3.11.7", "torch": "2.10.0"}
    nodes[2].devices, nodes[2].closed = [], {"n3": "10.0.0.3:4000: timed out"}
    nodes[3].unseen = {"model": "/models/a is not there"}
    assert problems(nodes) == [
        "n1 has torch 2.10.0, and n0 has 2.11.0; install one version everywhere",
        "n2 sees no CUDA device, and 3 others do; look at its driver with nvidia-smi",
        "n3: model: /models/a is not there",
        "n2 does not reach n3 (10.0.0.3:4000: timed out); open all ports between the nodes",
    ]


def test_a_node_that_does_not_answer_has_only_that_problem() -> None:
    silent = NodeReport("n1", unseen={"Ray": "it did not answer within 300 s"})
    assert problems([NodeReport("n0", **GOOD), silent]) == [("n1: Ray: it did not answer within 300 s")]  # type: ignore[arg-type]


def test_a_local_folder_is_distinguished_from_a_shared_one(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    assert unusable(tmp_path, "mark", "mark-n1") == "" and (tmp_path / "mark-n1").exists()
    assert "on a shared file system" in unusable(tmp_path, "another", "another-n1")


def test_checked_paths_are_models_and_data_on_disk(tmp_path: Path) -> None:
    config = load_config(
        None,
        [
            "flow=ppo",
            f"model={tmp_path}",
            "roles.critic.model=org/critic",
            f"data.train={tmp_path}/a.jsonl",
            "data.eval.b=b.jsonl",
        ],
    )
    result = paths_of(config)
    assert result.keys() == {"model", "data.train", "data.eval.b"} and result["data.eval.b"] == str(
        Path("b.jsonl").resolve()
    )
