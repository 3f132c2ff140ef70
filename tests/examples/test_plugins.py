"""User code outside the package: each plug-in of examples/plugins passes its contract, and a run selects it by name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from braidrl.agents.environment_contract import CHECKS as ENVIRONMENT_CHECKS
from braidrl.agents.environment_contract import EnvironmentUnderTest
from braidrl.engines.engine import ENGINES, EngineSpec
from braidrl.engines.engine_contract import CHECKS as ENGINE_CHECKS
from braidrl.engines.engine_contract import EngineUnderTest
from braidrl.engines.stepping import EngineReplica
from braidrl.observe.metrics import read_metrics
from braidrl.observe.trackers import check_tracker
from braidrl.rewards.verifier import Completion
from braidrl.rewards.verifier_contract import CHECKS as VERIFIER_CHECKS
from braidrl.rewards.verifier_contract import VerifierUnderTest
from braidrl.runtimes.run import TrainingRun
from braidrl.training.backend_contract import CHECKS as BACKEND_CHECKS
from braidrl.training.backend_contract import BackendUnderTest
from braidrl.training.backends import BackendSpec
from braidrl.training.names import BACKENDS
from braidrl.training.objective import Objective, denominators
from braidrl.training.optimizer_contract import CHECKS as OPTIMIZER_CHECKS
from braidrl.training.optimizer_contract import OptimizerUnderTest
from braidrl.weights.publisher import ModelWeights
from braidrl.weights.transport_contract import CHECKS as TRANSPORT_CHECKS
from tests.cases import soak_but
from tests.engines.tiny import END, make_model, make_tokenizer, training_log_probs
from tests.examples.test_documentation import section
from tests.tiny import ROOT, Workshop, load_module, recorded, weights_of
from tests.training.parallel.laid_out import OBJECTIVE, config_of, make_rows

PLUGINS = ROOT / "examples" / "plugins"
SHOWN = {
    "A verifier": "verifier",
    "An environment": "environment",
    "A column per token": "token_column",
    "An optimizer": "optimizer",
    "A tracker": "tracker",
    "A weight transport": "transport",
}


@pytest.mark.parametrize("title", SHOWN)
def test_the_page_shows_the_example_that_is_tested_here(title: str) -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", section(ROOT / "docs" / "extend.md", title), re.DOTALL)
    assert shown.strip() in (PLUGINS / f"{SHOWN[title]}.py").read_text()


def test_the_tracker_keeps_its_contract_and_a_run_writes_to_it(workshop: Workshop, tmp_path: Path) -> None:
    name = f"{PLUGINS}/tracker.py:Spreadsheet"
    check_tracker(name, tmp_path)
    run = workshop.run("tracked", trackers=[{"name": name, "params": {"columns": ["reward/mean"]}}])
    lines = [line.split("\t") for line in (run / "metrics.tsv").read_text().splitlines()]
    assert lines == [["step", "reward/mean"], *([str(m["step"]), str(m["reward/mean"])] for m in read_metrics(run))]
    assert not (run / "tensorboard").exists(), "other columns are not written"


LION = OptimizerUnderTest(f"{PLUGINS}/optimizer.py:Lion", {"betas": [0.9, 0.95]})


@pytest.mark.parametrize("check", OPTIMIZER_CHECKS, ids=lambda check: check.__name__)
def test_the_optimizer_keeps_the_contract(check: Callable[[OptimizerUnderTest], None]) -> None:
    check(LION)


@pytest.mark.parametrize("check", OPTIMIZER_CHECKS[:-1], ids=lambda check: check.__name__)
def test_the_optimizer_of_whole_matrices_keeps_the_contract(check: Callable[[OptimizerUnderTest], None]) -> None:
    check(OptimizerUnderTest(f"{PLUGINS}/muon.py:Muon"))


def test_muon_orthogonalises_each_matrix_of_a_stack_and_leaves_the_vocabulary_to_adamw() -> None:
    muon = load_module(PLUGINS / "muon.py")
    torch.manual_seed(3)
    stack = torch.randn(3, 6, 10, dtype=torch.float64)
    values = torch.linalg.svdvals(muon.newton_schulz(stack, 5))
    assert values.min() > 0.6 and values.max() < 1.3
    for matrix, result in zip(stack, muon.newton_schulz(stack, 5), strict=True):
        torch.testing.assert_close(result, muon.newton_schulz(matrix, 5), rtol=0, atol=1e-12)
    shapes = {"model.embed_tokens.weight": (9, 4), "lm_head.weight": (9, 4), "model.norm.weight": (4,)}
    shapes |= {"model.layers.0.mlp.experts.down_proj": (3, 4, 6), "model.layers.0.self_attn.q_proj.weight": (4, 4)}
    made = muon.Muon([(name, torch.zeros(shape)) for name, shape in shapes.items()], lr=1.0)
    assert [group["param_names"] for group in made.param_groups] == [list(shapes)[3:], list(shapes)[:3]]


def test_a_run_trains_with_the_optimizer(workshop: Workshop) -> None:
    run = workshop.run("lion", trainer={"optimizer": LION.name, "learning_rate": 1e-3})
    before = load_file(workshop.model / "model.safetensors")
    moved = {name: (tensor - before[name]).abs().max().item() for name, tensor in weights_of(run).items()}
    # Two steps with the size of the learning rate: a sign has no other size.
    assert max(moved.values()) == pytest.approx(2e-3, rel=1e-3)


VERIFIER = f"{PLUGINS}/verifier.py:counts_steps"


@pytest.mark.parametrize("check", VERIFIER_CHECKS, ids=lambda check: check.__name__)
def test_the_verifier_keeps_the_contract(check: Callable[[VerifierUnderTest], None]) -> None:
    right, wrong = Completion("2+2=", "So it is 4", "4"), Completion("2+2=", "So it is 5", "4")
    check(VerifierUnderTest(VERIFIER, right, wrong, {"at_most": 5}))


ENVIRONMENT = f"{PLUGINS}/environment.py:Countdown"


@pytest.mark.parametrize("check", ENVIRONMENT_CHECKS, ids=lambda check: check.__name__)
def test_the_environment_keeps_the_contract(check: Callable[[EnvironmentUnderTest], Awaitable[None]]) -> None:
    asyncio.run(check(EnvironmentUnderTest(ENVIRONMENT, ["4", "2"], {"start": 5})))  # type: ignore[arg-type]


def test_a_run_is_rewarded_by_the_verifier_and_another_plays_the_environment(workshop: Workshop) -> None:
    run = workshop.run("rewarded", reward={"verify": {"name": VERIFIER, "params": {"at_most": 5}}})
    assert len(read_metrics(run)) == 2
    played = workshop.run("played", rollout={"environment": {"name": ENVIRONMENT, "max_turns": 3}})
    assert all(line["environment/turns"] >= 1 for line in read_metrics(played))


ENGINE = f"{PLUGINS}/engine.py:PlainEngine"
MODEL = make_model()


@pytest.fixture(scope="module")
def engine_spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder = tmp_path_factory.mktemp("engine") / "model"
    MODEL.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return EngineSpec(ENGINE, str(folder), slots=16, max_sequence_tokens=128)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_the_engine_keeps_the_contract(
    engine_spec: EngineSpec, check: Callable[[EngineUnderTest], Awaitable[None]]
) -> None:
    def other_weights() -> ModelWeights:
        model = deepcopy(MODEL)
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        return ModelWeights(model)

    subject = EngineUnderTest(
        lambda: EngineReplica(ENGINES.find(ENGINE)(engine_spec)),
        END,
        128,
        lambda asked, finished: training_log_probs(MODEL, list(asked), list(finished)),
        other_weights,
    )
    asyncio.run(check(subject))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("runtime", "engines"), soak_but([("streaming", None)], [("eager", None), ("eager", 1), ("streaming", None)])
)
def test_a_run_on_the_engine_equals_a_run_on_the_embedded_engine(
    workshop: Workshop, runtime: str, engines: int | None
) -> None:
    """The engine runs in the training process, in a separate process, and in a worker of the queue."""
    common: dict[str, Any] = {"algorithm": {"old": "rollout"}, "trainer": {"learning_rate": 3e-3}}
    ours = workshop.run("embedded", **common)
    mine = workshop.run("mine", **common, runtime=runtime, rollout={"engine": ENGINE, "engines": engines})
    for step in (1, 2):
        assert recorded(mine, step)["tokens"].tolist() == recorded(ours, step)["tokens"].tolist()
    assert recorded(mine, 2)["version"].unique().tolist() == [1], "it received the weights of the first step"
    tensors, expected = weights_of(mine), weights_of(ours)
    assert all(torch.allclose(tensors[name], tensor, rtol=0, atol=1e-4) for name, tensor in expected.items())


BACKEND = f"{PLUGINS}/backend.py:PlainBackend"


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_the_backend_keeps_the_contract(
    workshop: Workshop, tmp_path: Path, check: Callable[[BackendUnderTest], None]
) -> None:
    config, rows = config_of(str(workshop.model), learning_rate=1e-2), make_rows()
    subject = BackendUnderTest(
        lambda: BACKENDS.find(BACKEND)(BackendSpec("actor", config)),
        Objective.of("actor", OBJECTIVE),
        rows,
        {"tokens": denominators(rows)["tokens"]},
        tmp_path / "exported",
        lambda: None,
        True,
    )
    check(subject)


@pytest.mark.soak
@pytest.mark.parametrize(
    "rollout", [pytest.param({}, marks=pytest.mark.soak), {"engine": ENGINE}], ids=["embedded", "own engine"]
)
def test_a_run_on_the_backend_equals_torch_with_sgd_and_resumes(workshop: Workshop, rollout: dict[str, Any]) -> None:
    trainer, common = (
        {"learning_rate": 0.1, "max_grad_norm": 0.5},
        {"rollout": rollout, "algorithm": {"old": "recompute"}},
    )
    mine = workshop.run("mine", trainer={**trainer, "backend": BACKEND}, **common)
    ours = workshop.run("ours", trainer={**trainer, "optimizer": "sgd"}, **common)
    for step in (1, 2):
        assert recorded(mine, step)["tokens"].tolist() == recorded(ours, step)["tokens"].tolist()
    tensors, expected = weights_of(mine), weights_of(ours)
    assert all(torch.allclose(tensors[name], tensor, rtol=0, atol=1e-5) for name, tensor in expected.items())
    more = read_metrics(ours)[1].keys() - read_metrics(mine)[1].keys()
    assert read_metrics(mine)[1].keys() <= read_metrics(ours)[1].keys()
    assert all(name.startswith("utilisation/operations/") for name in more), "only the backend knows its operations"
    before = load_file(workshop.model / "model.safetensors")
    assert not all(torch.equal(tensors[name], before[name]) for name in tensors)
    config = workshop.config("mine", trainer={**trainer, "backend": BACKEND, "steps": 3}, **common)
    with TrainingRun(config, resume=mine) as run:
        run.train()
    assert [line["step"] for line in read_metrics(mine)] == [1, 2, 3]


TRANSPORT = f"{PLUGINS}/transport.py:MappedFiles"


@pytest.mark.parametrize("name", ["collective", TRANSPORT], ids=["collective", "own"])
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_the_transport_keeps_the_contract(name: str, check: Callable[[str], None]) -> None:
    check(name)


@pytest.mark.soak
def test_a_run_with_the_transport_equals_one_with_the_process_group(workshop: Workshop) -> None:
    common: dict[str, Any] = {"algorithm": {"old": "rollout"}, "trainer": {"learning_rate": 3e-3}}
    ours, mine = (
        workshop.run(label, **common, rollout={"engines": 1, "weights": way})
        for label, way in (("ours", "collective"), ("mine", TRANSPORT))
    )
    assert recorded(mine, 2)["tokens"].tolist() == recorded(ours, 2)["tokens"].tolist()
    assert recorded(mine, 2)["version"].unique().tolist() == [1], "it received the weights of the first step"
    assert all(torch.equal(weights_of(mine)[name], tensor) for name, tensor in weights_of(ours).items())
