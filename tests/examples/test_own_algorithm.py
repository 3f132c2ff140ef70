"""The algorithm of docs/extend.md runs exactly as written there: a user's advantage, loss and recipe, in Python and in
YAML.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.flow.recipes import load_flow
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.prepare.run_flow import build_flow
from braidrl.runtimes.restarts import train
from tests.examples.test_documentation import section
from tests.tiny import ROOT, Workshop, weights_of

SECTION = section(ROOT / "docs" / "extend.md", "An algorithm")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], sums_file: Path) -> Workshop:
    """Write the documentation's files into one folder, because a function is registered once per process."""
    workshop = Workshop(tmp_path_factory.mktemp("own"), tiny_models["qwen3"], sums_file)
    python, loss = blocks("python")
    (workshop.folder / "median.py").write_text(python)
    (workshop.folder / "likelihood.py").write_text(loss)
    (workshop.folder / "median.yaml").write_text(blocks("yaml")[0])
    return workshop


def test_a_users_recipe_trains_in_python_and_in_yaml_to_the_same_weights(own: Workshop) -> None:
    in_python = own.run("python", flow=f"{own.folder}/median.py:median", algorithm={"scale": 2.0})
    in_yaml = own.run("yaml", flow=f"{own.folder}/median.yaml")
    assert [line["step"] for line in read_metrics(in_python)] == [1, 2]
    assert all(line["actor/grad_norm"] > 0 for line in read_metrics(in_python))
    mine, theirs = weights_of(in_python), weights_of(in_yaml)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_its_setting_is_checked(own: Workshop) -> None:
    function = f"{own.folder}/median.py:median"
    assert load_flow(function, {"scale": 3.0}, {})["median_centered"].params == {"scale": 3.0}
    with pytest.raises(UserError, match=r"scale: .*greater than 0"):
        load_flow(function, {"scale": -1}, {})


def test_a_users_loss_is_trained_and_its_metric_reported(own: Workshop) -> None:
    flow = own.folder / "likelihood.yaml"
    name = '{name: "likelihood.py:weighted_likelihood", floor: 0.1}'
    flow.write_text((own.folder / "median.yaml").read_text().replace("{name: clip, low: 0.2, high: 0.28}", name))
    config = parse_config(own.tree("loss", flow=str(flow)))
    assert build_flow(config)["actor.update"].params["loss"]["floor"] == 0.1
    lines = read_metrics(train(config))
    assert all(0 < line["actor/advantage_positive"] < 1 for line in lines)
