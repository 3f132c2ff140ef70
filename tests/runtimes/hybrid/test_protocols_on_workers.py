"""Each transfer protocol on real workers, by a method of a worker's class: its result equals plain calls in one
process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.runtimes.session import Session
from tests.runtimes.hybrid.warm import WarmCluster
from tests.tiny import Workshop

METHODS = """
from braidrl.runtimes.hybrid.protocols import BUILT_IN, register

READS = ("tokens", "action_mask", "sequence_lengths")


class Every:
    def __init__(self, worker):
        self.worker = worker

    @register(protocol="PP_ONLY")
    def layers(self, prefix):
        names = [name.partition(prefix)[2] for name, _ in self.worker.model.named_parameters() if prefix in name]
        return sorted({int(name.partition(".")[0]) for name in names})

    @register(protocol="ONE_TO_ALL")
    def more(self, number):
        return self.worker.ranks.rank + number

    @register(protocol="ALL_TO_ALL")
    def sum(self, first, second):
        return self.worker.ranks.rank, first + second

    @register(protocol="RANK_ZERO")
    def zero(self, number):
        return self.worker.ranks.rank, number


def surprise(self, rows, scale):
    return {"surprise": -scale * self.worker.forward("log_probs", rows).row_means(),
            "rank": 0 * rows["sample"] + self.worker.ranks.rank}


def by(protocol):
    def call(self, rows, scale):
        return surprise(self, rows, scale)

    return register(protocol=protocol, reads=READS, writes=("surprise", "rank"))(call)


for name in ("DP", "THREE_D", "THREE_D_MICRO_DP", "PP_AS_DP"):
    setattr(Every, name.lower(), by(name))
"""
# Each layout with the ranks whose rows each protocol returns.
LAYOUTS: list[tuple[dict[str, int], dict[str, list[int]]]] = [
    ({"pipeline": 2, "data": 2}, {"three_d": [2, 3], "pp_as_dp": [0, 2, 1, 3], "three_d_micro_dp": [0, 1, 2, 3]}),
    ({"data": 2, "tensor": 2, "generate": 2}, {"three_d": [0, 2], "pp_as_dp": [0, 2], "three_d_micro_dp": [0, 2]}),
]
EIGHT = (
    {"pipeline": 2, "data": 2, "tensor": 2, "generate": 2},
    {"three_d": [4, 6], "pp_as_dp": [0, 4, 2, 6], "three_d_micro_dp": [0, 4, 2, 6]},
)


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("methods") / "every.py"
    file.write_text(METHODS)
    return file


def settings(methods: Path, layout: dict[str, int]) -> dict[str, Any]:
    axes = {axis: size for axis, size in layout.items() if axis != "generate"}
    workers = axes.get("pipeline", 1) * axes["data"] * axes.get("tensor", 1)
    return {
        "flow": "grpo",
        "dtype": "float64",
        "algorithm": {"kl_coef": 0},
        "trainer": {"prompts_per_step": 4},
        "runtime": "hybrid",
        "workers": workers,
        "roles": {"actor": {"methods": f"{methods}:Every", "layout": axes}},
        "rollout": {"tensor": layout.get("generate", 1)},
    }


@pytest.fixture(scope="module")
def plain(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], sums_file: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """The group and sample of each row, and what the method returns for it, of a worker that is called here."""
    workshop = Workshop(tmp_path_factory.mktemp("plain"), tiny_models["qwen3"], sums_file)
    config = workshop.config(flow="grpo", dtype="float64", algorithm={"kl_coef": 0}, trainer={"prompts_per_step": 4})
    with Session(config) as session:
        rows = session.actor.generate(session.prompts())
        worker = session.backend.executor.workers["actor"]  # type: ignore[union-attr]
        result = -2.0 * worker.forward("log_probs", rows.rows).row_means()
        return 100 * rows["group"] + rows["sample"], result


@pytest.mark.parametrize(
    ("layout", "returned"), [*LAYOUTS, pytest.param(*EIGHT, marks=pytest.mark.soak)], ids=lambda one: "-".join(one)
)
def test_every_protocol_on_workers_equals_plain_calls(
    workshop: Workshop,
    warm_cluster: WarmCluster,
    methods: Path,
    plain: tuple[torch.Tensor, torch.Tensor],
    layout: dict[str, int],
    returned: dict[str, list[int]],
) -> None:
    places, expected = plain
    config = workshop.config(**settings(methods, layout))
    ranks, depth = range(config.workers), layout.get("pipeline", 1)
    with Session(config) as session:
        rows = session.actor.generate(session.prompts())
        for protocol, answering in {"dp": list(ranks), **returned}.items():
            index = session.index(getattr(session.actor, protocol)(rows, 2.0))
            assert torch.equal(100 * index["group"] + index["sample"], places), protocol
            torch.testing.assert_close(index["surprise"], expected, rtol=1e-9, atol=1e-9)
            assert list(dict.fromkeys(index["rank"].tolist())) == answering, protocol
        layers = session.actor.layers("layers.")
        assert len(layers) == depth and sorted(number for own in layers for number in own) == [0, 1]
        assert session.actor.more(10) == [10 + rank for rank in ranks]
        assert session.actor.sum([*ranks], [5] * len(ranks)) == [(rank, rank + 5) for rank in ranks]
        assert session.actor.zero("this") == (0, "this")
