"""Worker methods and a transfer protocol in a file outside the package, named in the configuration and called from a
session.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.errors import UserError
from braidrl.importing import import_function
from braidrl.runtimes.hybrid.protocol_contract import check_protocol
from braidrl.runtimes.session import Session
from tests.examples.test_documentation import section
from tests.runtimes.hybrid.backends import told
from tests.runtimes.hybrid.warm import WarmCluster
from tests.tiny import ROOT, Workshop, load_module, recorded

EXAMPLE = ROOT / "examples" / "own_protocol"
SECTION = section(ROOT / "docs" / "extend.md", "A protocol, and worker methods")
PIDS = """
import os
import torch
from braidrl.runtimes.hybrid.protocols import register
PROTOCOL

class Probe:
    def __init__(self, worker):
        self.worker = worker

    @register(protocol=IN_TURN, writes=("pid", "place"))
    def note(self, rows):
        assert "prompt" not in rows and "tokens" not in rows, "it got payload that it did not ask for"
        return {"pid": torch.full((len(rows),), os.getpid()), "place": 100 * rows["group"] + rows["sample"]}

    @register(protocol="RANK_ZERO")
    def add(self, first, second):
        return first + second

    @register(protocol="RANK_ZERO", reads=("tokens",))
    def count(self, rows):
        return len(rows), len(rows["tokens"].values)

    @register(protocol="DP", writes=("tokens", "place"))
    def forget(self, rows):
        return {"place": rows["sample"]}

    def unregistered(self): ...
"""


def settings(methods: Path, name: str, **more: Any) -> dict[str, Any]:
    return {
        "flow": "grpo",
        "runtime": "hybrid",
        "dtype": "float64",
        "workers": 2,
        "trainer": {"prompts_per_step": 3},
        "roles": {"actor": {"methods": f"{methods}:{name}"}},
        **more,
    }


@pytest.fixture
def own(workshop: Workshop) -> Path:
    """Write a user's file with the protocol of the page."""
    protocol = next(block for block in re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL) if "IN_TURN =" in block)
    file = workshop.folder / "probe.py"
    file.write_text(PIDS.replace("PROTOCOL", protocol))
    return file


def test_user_protocol_distributes_rows_and_collects_in_order(
    workshop: Workshop, warm_cluster: WarmCluster, own: Path
) -> None:
    with Session(workshop.config(**settings(own, "Probe"))) as session:
        rows = session.actor.note(session.actor.generate(session.prompts()))
        index = session.index(rows)
        assert session.actor.add(2, 3) == 5
        assert index["place"].tolist() == (100 * index["group"] + index["sample"]).tolist()
        first, second = index["pid"][:2].tolist()
        assert first != second and index["pid"].tolist() == [first, second] * (len(index) // 2)
        assert session.index(session.reward.verify(rows))["pid"].tolist() == index["pid"].tolist()
        (before,) = told(session.backend, "given_out")
        assert session.actor.count(rows) == (len(rows), int(index["length"].sum()))
        (after,) = told(session.backend, "given_out")
        assert after == [before[0], [*before[1], after[1][-1]]], "rank 0 fetches once, what rank 1 holds"


def send(number: signal.Signals, processes: list[int]) -> None:
    for process in processes:
        os.kill(process, number)


def test_a_method_that_writes_columns_returns_before_its_rows_exist(
    workshop: Workshop, warm_cluster: WarmCluster
) -> None:
    config = workshop.config(**settings(EXAMPLE / "methods.py", "Surprise", placement="colocate"))
    with Session(config) as session:
        rows = session.prompts()
        # The results cannot have been computed when the calls return.
        workers = [process for pool in told(session.backend, "process") for process in pool]
        send(signal.SIGSTOP, workers)
        try:
            rows = session.actor.surprise(session.actor.generate(rows), 2.0)
        finally:
            send(signal.SIGCONT, workers)
        index = session.index(rows)
    assert index["surprise"].shape == (len(rows),) and bool((index["surprise"] > 0).all())


def test_method_result_is_independent_of_protocol_and_workers(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    (shown,) = [
        b
        for b in re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
        if b.lstrip().startswith("from") and "class" in b
    ]
    page = workshop.folder / "methods_of_the_page.py"
    page.write_text(shown)
    result = []
    for methods, workers in ((EXAMPLE / "methods.py", 1), (EXAMPLE / "methods.py", 2), (page, 2)):
        with Session(workshop.config(**settings(methods, "Surprise", workers=workers))) as session:
            rows = session.actor.surprise(session.actor.generate(session.prompts()), 1.0)
            result.append(session.index(rows)["surprise"])
    assert torch.allclose(result[0], result[1], atol=1e-12) and torch.allclose(result[0], result[2], atol=1e-12)


FLOW = """
flow: surprised
stages:
- {role: actor, type: generate}
- {role: reward, type: verify}
- {role: actor, type: "METHODS:Surprise.surprise", params: {scale: 2.0}}
- {type: advantage.group_normalized}
- {role: actor, type: update, params: {loss: {name: clip}, old: self}}
"""


def test_user_method_runs_as_stage_under_every_runtime(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    """Under hybrid its protocol distributes the rows in turn; a single process gets all of them."""
    flow = workshop.folder / "surprised.yaml"
    flow.write_text(FLOW.replace("METHODS", str(EXAMPLE / "methods.py")))
    own = {"flow": str(flow), "dtype": "float64", "trainer": {"steps": 1, "prompts_per_step": 4}}
    alone, hybrid = (
        recorded(workshop.run(name, **own, **more), 1).ordered()
        for name, more in (("alone", {}), ("hybrid", {"runtime": "hybrid", "workers": 2}))
    )
    assert bool((alone["surprise"] > 0).all())
    assert torch.allclose(alone["surprise"], hybrid["surprise"], atol=1e-9)


def test_mistakes_are_named_in_one_line(workshop: Workshop, warm_cluster: WarmCluster, own: Path) -> None:
    with Session(workshop.config(**settings(own, "Probe"))) as session:
        with pytest.raises(UserError, match=r"Probe .*'ad' with @register.*'add'"):
            session.actor.ad(1)
        with pytest.raises(UserError, match=r"Probe .*'unregistered' with @register"):
            session.actor.unregistered()
        with pytest.raises(UserError, match=r"write roles.reference.methods=file.py:Class"):
            session.reference.note(1)
        with pytest.raises(UserError, match=r"actor.forget returned \['place'\] .*writes="):
            session.index(session.actor.forget(session.prompts()))


def test_a_missing_file_is_refused_before_anything_starts(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    with pytest.raises(UserError, match=r"no file .*nothing.py"):
        Session(workshop.config(**settings(workshop.folder / "nothing.py", "Probe")))
    assert not warm_cluster.actors


def test_in_one_process_there_are_no_workers_to_call(workshop: Workshop, own: Path) -> None:
    with (
        Session(workshop.config(**settings(own, "Probe", runtime="eager"))) as session,
        pytest.raises(UserError, match="write runtime=hybrid"),
    ):
        session.actor.add(1, 2)


def test_the_example_runs_and_its_protocol_keeps_the_contract(
    workshop: Workshop, warm_cluster: WarmCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    check_protocol(vars(load_module(EXAMPLE / "methods.py"))["IN_TURN"])
    load_module(EXAMPLE / "run.py").main(
        [
            f"model={workshop.model}",
            f"data.train={workshop.data}",
            "device=cpu",
            "threads=1",
            "trainer.steps=2",
            f"reward.verify={workshop.folder}/verifiers.py:starts_even",
            "rollout.max_response_tokens=8",
            "trainer.prompts_per_step=4",
            "rollout.samples_per_prompt=4",
            "rollout.slots=16",
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["workers: 2", "step 1", "step 2"]


def test_the_protocol_that_the_page_shows_keeps_the_contract(own: Path) -> None:
    check_protocol(import_function(f"{own}:Probe").note.registration.protocol)
