"""A user's functions in files outside the package work from Python and from YAML."""

import hashlib
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from braidrl.data.rows import Rows
from braidrl.flow import Flow, actor, advantage, reward
from braidrl.flow.compute import computed, dropped
from braidrl.flow.recipes import load_flow
from braidrl.flow.signatures import compute_entry
from braidrl.flow.stages import make_stage
from braidrl.flow.yaml_form import from_yaml, to_yaml
from braidrl.training.objective import Objective
from tests.flow.flows import message_of

ADVANTAGE = """
import torch
from torch import Tensor
from braidrl.algorithms.registry import advantages, aggregations, losses

@advantages.register(writes=["advantage"])
def {name}(reward: Tensor, *, floor: float = 0.0) -> Tensor:
    return (reward - reward.median()).clamp(min=floor)

@losses.register()
def {name}_loss(log_probs: Tensor, advantages: Tensor) -> Tensor:
    return -advantages * log_probs

@aggregations.register()
def {name}_mean(offsets: Tensor) -> Tensor:
    return torch.ones(1)
"""
RECIPE = """
from pydantic import BaseModel, Field
from braidrl.flow import Flow, actor, advantage, loss, reward
import {name}

class Parameters(BaseModel):
    floor: float = Field(0.0, le=1.0)
    max_response_tokens: int

def with_parameters(p: Parameters) -> Flow:
    return flow(p.floor)

def without() -> Flow:
    return flow(0.0)

def not_a_flow():
    return 3

def two(a, b): ...

def flow(floor):
    update = actor.update(loss=loss.{name}_loss(), aggregate="{name}_mean")
    return Flow("own", [actor.generate(), reward.verify(), advantage.{name}(floor=floor), update])
"""
YAML = """
flow: own
stages:
- {{role: actor, type: generate}}
- {{role: reward, type: verify}}
- {{type: "{place}:{name}", params: {{floor: 0.5}}}}
- role: actor
  type: update
  params: {{loss: {{name: "{place}:{name}_loss"}}, aggregate: "{place}:{name}_mean"}}
"""


def own_file(folder: Path, name: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(ADVANTAGE.format(name=name))
    return path


def python_flow(name):
    return Flow(
        "own",
        [
            actor.generate(),
            reward.verify(),
            getattr(advantage, name)(floor=0.5),
            actor.update(loss={"name": f"{name}_loss"}, aggregate=f"{name}_mean"),
        ],
    )


def test_a_function_beside_the_yaml_equals_the_same_function_in_python(tmp_path):
    own_file(tmp_path, "median_a")
    (tmp_path / "flow.yaml").write_text(YAML.format(place="median_a.py", name="median_a"))
    flow = from_yaml(tmp_path / "flow.yaml")
    assert [stage.name for stage in flow.stages] == ["actor.generate", "reward.verify", "median_a", "actor.update"]
    assert flow == python_flow("median_a")
    assert from_yaml(to_yaml(flow)) == flow
    entry = compute_entry(flow["median_a"].type)
    assert entry.function(torch.tensor([1.0, 2.0, 4.0]), floor=0.5).tolist() == [0.5, 0.5, 2.0]


def test_function_of_a_module_is_found_by_both_forms(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = own_file(tmp_path, "median_b")
    importlib.import_module("median_b")
    by_module = from_yaml(YAML.format(place="median_b", name="median_b"))
    assert by_module == python_flow("median_b")
    assert by_module["median_b"].type == "median_b:median_b"
    by_file = from_yaml(YAML.format(place=path, name="median_b"))
    assert by_file == by_module, "a file that was imported already is not executed again"


def test_file_in_the_current_folder_is_found(tmp_path, monkeypatch):
    own_file(tmp_path, "median_c")
    monkeypatch.chdir(tmp_path)
    assert from_yaml(YAML.format(place="median_c.py", name="median_c"))["median_c"].params == {"floor": 0.5}


@pytest.mark.soak
def test_another_process_finds_the_functions_of_a_flow_made_in_python(tmp_path):
    path = own_file(tmp_path, "median_d")
    (tmp_path / "flow.yaml").write_text(YAML.format(place=path, name="median_d"))
    text = to_yaml(from_yaml(tmp_path / "flow.yaml"))
    script = (
        "import json, sys; from braidrl.flow.yaml_form import from_yaml, to_yaml; text = json.load(sys.stdin);"
        "assert to_yaml(from_yaml(text)) == text"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(text), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_recipe_of_a_user_takes_checked_parameters_or_none(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    own_file(tmp_path, "median_e")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(name="median_e"))
    flow = load_flow(f"{recipe}:with_parameters", {"floor": 0.5}, {"max_response_tokens": 8, "samples_per_prompt": 4})
    assert flow == python_flow("median_e")
    assert load_flow(f"{recipe}:without")["median_e"].params == {"floor": 0.0}
    errors = {
        ("with_parameters", "floor", 2.0): "floor: Input should be less than or equal to 1, got 2.0",
        ("with_parameters", "floor", 1.0): "the parameter 'max_response_tokens' is not set",
        ("without", "floor", 1.0): "takes no parameters, got 'floor'",
    }
    for (function, key, value), message in errors.items():
        assert message_of(lambda f=function, k=key, v=value: load_flow(f"{recipe}:{f}", {k: v})).endswith(message)
    assert "must return a Flow, not int" in message_of(lambda: load_flow(f"{recipe}:not_a_flow"))
    assert "must take nothing, or one argument" in message_of(lambda: load_flow(f"{recipe}:two"))


def test_a_failing_file_is_named_and_can_be_fixed(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('out of paper')")
    for _ in range(2):
        message = message_of(lambda: from_yaml(YAML.format(place=path, name="broken")))
        assert re.search(rf"{path} raised RuntimeError .*\(broken.py:1\)$", message)
    path.write_text(ADVANTAGE.format(name="broken"))
    assert "broken" in {stage.name for stage in from_yaml(YAML.format(place=path, name="broken")).stages}


def test_function_registered_twice_cannot_be_named_by_its_place(tmp_path):
    path = own_file(tmp_path, "median_f")
    path.write_text(path.read_text() + '\nadvantages.register("median_g", writes=["advantage"])(median_f)\n')
    message = message_of(lambda: from_yaml(YAML.format(place=path, name="median_f")))
    assert "median_f and median_g; register" in message


@pytest.mark.parametrize("name", ["own.py", "own"])
def test_name_without_a_function_is_refused(name):
    assert message_of(lambda: load_flow(f"{name}:")).startswith(f"'{name}:' names no function")


WRONG = """
import torch
from braidrl.algorithms.registry import advantages, aggregations, losses, selections


@advantages.register(writes=["advantage"])
def {name}_short(reward):
    return reward[:-1]


@advantages.register(writes=["advantage"])
def {name}_square(reward):
    return reward[:, None]


@advantages.register(writes=["advantage"])
def {name}_list(reward):
    return reward.tolist()


@advantages.register(writes=["advantage"])
def {name}_two(reward):
    return reward, reward


@advantages.register(writes=["advantage"])
def {name}_in_place(reward):
    return reward.sub_(reward.mean())


@advantages.register(writes=["advantage"])
def {name}_raises(reward):
    return reward + torch.ones(7)


@selections.register(scope="group")
def {name}_mask(group):
    return group > 0


@selections.register(scope="group")
def {name}_place(group):
    return {{7: "the last"}}


@selections.register(scope="group")
def {name}_tensors(group):
    return {{number: "odd" for number in group.unique() if number % 2}}


@losses.register()
def {name}_mean(log_probs):
    return -log_probs.mean(), {{}}


@losses.register()
def {name}_column(log_probs):
    return -log_probs[:, None], {{}}


@losses.register()
def {name}_alone(log_probs):
    return -log_probs


@losses.register()
def {name}_metric(log_probs):
    return -log_probs, {{"mean": log_probs.mean()}}


@losses.register()
def {name}_constant(log_probs):
    return -log_probs.detach(), {{}}


@losses.register()
def {name}_right(log_probs):
    return -log_probs, {{}}


@aggregations.register()
def {name}_one(offsets):
    return torch.ones(1)
"""


def wrong(folder: Path, function: str) -> str:
    """Return the place of a function of `WRONG`, in a file of the test's own: names are registered once."""
    path = folder / f"wrong_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}.py"
    path.write_text(WRONG.format(name=path.stem))
    return f"{path}:{path.stem}_{function}"


def table() -> Rows:
    """Return four rows of two groups, with two action tokens each."""
    rewards, groups = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([0, 0, 1, 1])
    return Rows({"reward": rewards, "group": groups, "advantage": rewards.clone()})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("short", r"returned .*\(3,\) as 'advantage' .*\(4,\)"),
        ("square", r"returned .*\(4, 1\) as 'advantage' .*4"),
        ("list", r"returned \[0.0,.* 3.0\] as 'advantage' .*4"),
        ("two", r"returned 2 columns .*writes=\['advantage'\]"),
        ("in_place", r"changes its argument 'reward' in place"),
        ("raises", r"_raises raised RuntimeError: .*\(wrong_\w+.py:33\); mend"),
    ],
)
def test_a_column_that_is_not_one_number_per_row_is_refused(tmp_path, function, message):
    stage = make_stage(wrong(tmp_path, function))
    assert re.search(message, message_of(lambda: computed(stage, table())))


def test_a_selection_returns_numbers_of_groups(tmp_path):
    stages = {name: make_stage(wrong(tmp_path, name)) for name in ("mask", "place", "tensors")}
    assert "return a dict" in message_of(lambda: dropped(stages["mask"], table()))
    assert "dropped [7], which are no numbers" in message_of(lambda: dropped(stages["place"], table()))
    assert dropped(stages["tensors"], table()) == {1: "odd"}, "numbers may be tensors"


@pytest.mark.parametrize(
    ("loss", "aggregate", "message"),
    [
        ("mean", "token-mean", r"_mean returned .*\(\) .*8 tokens; .*\(8,\)"),
        ("column", "token-mean", r"_column returned .*\(8, 1\) .*8 tokens"),
        (
            "alone",
            "token-mean",
            r"_alone returned .*\(8,\); return .*dict",
        ),
        ("metric", "token-mean", r"returned .*\(\) .*metric 'mean' .*8 tokens"),
        ("constant", "token-mean", r"log_probs or entropy: .*no gradient"),
        ("right", "one", r"_one returned .*\(1,\) .*8 tokens"),
    ],
)
def test_a_loss_that_is_not_one_number_per_token_is_refused(tmp_path, loss, aggregate, message):
    aggregate = aggregate if aggregate == "token-mean" else wrong(tmp_path, aggregate)
    objective = Objective.of("actor", actor.update(loss={"name": wrong(tmp_path, loss)}, aggregate=aggregate).params)
    predicted = {"log_probs": torch.zeros(8, requires_grad=True), "entropy": torch.zeros(8)}
    rows, offsets = table(), torch.tensor([0, 2, 4, 6, 8])
    assert re.search(message, message_of(lambda: objective.sums(rows, offsets, predicted)))


def test_a_flow_of_something_else_than_stages_is_refused():
    assert "has no stages" in message_of(lambda: Flow("empty", []))
    assert "call the function that makes one" in message_of(lambda: Flow("not called", [actor.generate]))
    both = [actor.generate(), actor.values()]
    assert "actor.generate needs a language model" in message_of(lambda: Flow("two heads", both))


def test_an_exception_in_a_users_recipe_has_its_line(tmp_path):
    (tmp_path / "typo.py").write_text("from braidrl.flow import actor\ndef recipe():\n    return actor.genrate()\n")
    said = message_of(lambda: load_flow(f"{tmp_path}/typo.py:recipe"))
    assert "raised AttributeError" in said and "(typo.py:3)" in said
