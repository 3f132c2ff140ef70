"""Streaming with any engine and any layout: the run of one process, bit for bit where the engine computes in float64,
else by its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.stepping import EngineReplica
from braidrl.errors import UserError
from braidrl.runtimes.run import TrainingRun
from tests.engines.http.servers import SglangSpeaker, VllmServer, in_a_thread
from tests.engines.served import served_model, vllm_python, write_served_model
from tests.engines.test_factory import gaps_of
from tests.engines.tiny import make_tokenizer
from tests.invariants.traces import assert_same, merged, trace
from tests.tiny import Workshop, recorded, sums, write_jsonl, write_model

FEW: dict[str, Any] = {
    "trainer": {"steps": 2, "prompts_per_step": 2, "rows_per_update": 4, "learning_rate": 3e-3},
    "algorithm": {"old": "recompute", "kl_coef": 0.1},
    "rollout": {"samples_per_prompt": 4, "max_sequence_tokens": 100},
}
IN_FLOAT64: dict[str, Any] = merged(
    FEW, {"dtype": "float64", "trainer": {"checkpoint_every": 1, "keep_checkpoints": 5}}
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "shard": {"data": 2, "shard": "full"},
}
PAIRS = [("embedded", "tensor"), ("http", "data")]
ALL = [(engine, layout) for engine in ("embedded", "vllm", "http") for layout in LAYOUTS]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("engines")
    write_served_model(folder / "served")
    (folder / "parity.py").write_text("def even(response: str) -> bool:\n    return sum(response.encode()) % 2 == 0\n")
    return Workshop(folder, write_model(folder / "model", "qwen2"), write_jsonl(folder / "train.jsonl", sums(24)))


@pytest.fixture(scope="module")
def alone(workshop: Workshop) -> Callable[[bool], Path]:
    """The same run in one process, with a layout of one device."""
    made: dict[bool, Path] = {}

    def run(exact: bool) -> Path:
        if exact not in made:
            made[exact] = workshop.run(f"alone-{exact}", **(IN_FLOAT64 if exact else served(workshop)))
        return made[exact]

    return run


def served(workshop: Workshop) -> dict[str, Any]:
    """Settings for a model with heads as wide as vLLM needs."""
    reward = {"verify": f"{workshop.folder}/parity.py:even"}
    return merged(FEW, {"model": str(workshop.folder / "served"), "reward": reward})


def streamed(workshop: Workshop, name: str, layout: str, settings: dict[str, Any]) -> Path:
    laid_out = {"trainer": {"layout": LAYOUTS[layout]}, "runtime": "streaming", "streaming": {"dispatch_rows": 3}}
    return workshop.run(name, **merged(settings, laid_out))


def assert_run_of_one_process(workshop: Workshop, alone: Callable[[bool], Path], engine: str, layout: str) -> None:
    name = f"{engine}-{layout}"
    if engine == "embedded":
        # It decodes in the run's float64.
        assert_same(trace(streamed(workshop, name, layout, IN_FLOAT64)), trace(alone(True)))
        return
    if engine == "vllm":
        python = vllm_python()
        own = {"engine": "vllm", "reproducible": True, **({"python": str(python)} if python else {})}
        run = streamed(workshop, name, layout, merged(served(workshop), {"rollout": own}))
        assert recorded(run, 1)["tokens"].tolist() == recorded(alone(False), 1)["tokens"].tolist()
    else:
        model, tokenizer = served_model(), make_tokenizer()
        speaker = SglangSpeaker(EngineReplica(EmbeddedEngine(model, tokenizer, Decoding(16, 650))))
        with in_a_thread(speaker) as url:
            own = {"engine": "http", "servers": {"urls": url, "dialect": "sglang"}}
            run = streamed(workshop, name, layout, merged(served(workshop), {"rollout": own}))
    assert max(gaps_of(run, 2)) < 1e-5
    for step in (1, 2):
        rows = recorded(run, step)
        assert rows.uids() == recorded(alone(False), step).uids()
        assert rows["version"].unique().tolist() == [step - 1]


@pytest.mark.parametrize(("engine", "layout"), PAIRS)
def test_an_engine_and_a_layout_give_the_run_of_one_process(
    workshop: Workshop, alone: Callable[[bool], Path], engine: str, layout: str
) -> None:
    assert_run_of_one_process(workshop, alone, engine, layout)


@pytest.mark.soak
@pytest.mark.parametrize(("engine", "layout"), [pair for pair in ALL if pair not in PAIRS])
def test_every_engine_with_every_layout_gives_the_run_of_one_process(
    workshop: Workshop, alone: Callable[[bool], Path], engine: str, layout: str
) -> None:
    assert_run_of_one_process(workshop, alone, engine, layout)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_server_of_vllms_own_draws_the_tokens_of_one_process(
    workshop: Workshop, alone: Callable[[bool], Path]
) -> None:
    server = VllmServer(workshop.folder / "served")
    try:
        own = {"engine": "http", "reproducible": True, "servers": server.url}
        run = streamed(workshop, "http-vllm", "shard", merged(served(workshop), {"rollout": own}))
    finally:
        server.close()
    assert recorded(run, 1)["tokens"].tolist() == recorded(alone(False), 1)["tokens"].tolist()
    assert max(gaps_of(run, 2)) < 1e-5


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"trainer": {"layout": {"tensor": 2}}, "streaming": {"workers": {"actor": 3}}},
            r"2 devices .*3; write numbers .*streaming.workers.actor=2",
        ),
        (
            {
                "rollout": {"engine": "http", "servers": "http://127.0.0.1:9"},
                "streaming": {"workers": {"actor.generate": 2}},
            },
            r"servers .*; write streaming.workers.actor.generate=1",
        ),
        (
            {"rollout": {"grouping": "gather"}},
            r"rollout.grouping=gather .*embedded engine",
        ),
        (
            {"rollout": {"pipeline": 2}},
            r"rollout.pipeline=2 .*embedded engine",
        ),
    ],
)
def test_processes_that_do_not_fit_are_refused_before_anything_starts(
    workshop: Workshop, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        TrainingRun(workshop.config("refused", **{"runtime": "streaming", **sections}))
    assert "\n" not in str(caught.value)
