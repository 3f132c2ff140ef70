"""The documentation matches the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import braidrl.flow
from braidrl.agents.dialects import DIALECTS
from braidrl.agents.dialects.chat import LIMITS, UNSUPPORTED, USUAL
from braidrl.agents.dialects.dialect import MOST_CHOICES, MOST_STOPS
from braidrl.cli.commands import app
from braidrl.data.rows import FinishReason
from braidrl.flow.recipes import load_flow
from braidrl.observe.metrics import REQUIRED_KEYS, read_metrics
from braidrl.observe.rollouts import rollout_path
from braidrl.rewards.verifiers import VERIFIERS
from tests.tiny import ROOT, Workshop, load_module

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]


@pytest.mark.parametrize("name", ["write_configuration", "write_catalogue", "write_families"])
def test_a_generated_page_equals_its_scripts_output(name: str) -> None:
    script = load_module(DOCS / f"{name}.py")
    assert script.PAGE.read_text() == script.page(), f"run: python docs/{name}.py"


def section(page: Path, title: str) -> str:
    """Return the part of a page below a heading of the second level."""
    return re.split(r"^## ", page.read_text().partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


PLACEHOLDERS = {"K": r"\d+", "STAGE": ".+", "SET": ".+", "REASON": ".+", "NAME": ".+", "ROLE": "[a-z_]+"}


def test_the_metrics_page_explains_every_key_that_a_run_writes(workshop: Workshop) -> None:
    page = (DOCS / "metrics.md").read_text()
    evaluated = {"evaluation": {"every": 1, "samples": 2}, "data": {"eval": {"held_out": str(workshop.data)}}}
    dapo = workshop.run("dapo", flow="dapo", algorithm={"overlong_cache": 2, "old": "recompute"}, **evaluated)
    grpo = workshop.run("grpo", flow="grpo")
    written = {name for run in (dapo, grpo) for line in read_metrics(run) for name in line} | set(REQUIRED_KEYS)
    patterns = [
        re.sub("|".join(PLACEHOLDERS), lambda found: PLACEHOLDERS[found[0]], re.escape(key))
        for key in re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    ]
    assert not {name for name in written if not any(re.fullmatch(pattern, name) for pattern in patterns)}


def test_the_page_of_recorded_rollouts_has_every_column_and_finish_reason(workshop: Workshop) -> None:
    page = (DOCS / "recorded-rollouts.md").read_text()
    named = set(re.findall(r"`([A-Za-z_.]+)`", "".join(line for line in page.splitlines() if line.startswith("| `"))))
    several = {"verify": [f"{workshop.folder}/verifiers.py:starts_even", "gsm8k"]}
    written = set()
    for name, more in (("ppo", {"algorithm": {"reward": "verify"}}), ("dapo", {"reward": several})):
        run = workshop.run(name, flow=name, trainer={"steps": 1}, **more)
        written |= set(pq.read_schema(rollout_path(run, 1)).names)
    patterns = [re.escape(name).replace("NAME", ".+").replace("INTO", ".+") for name in named]
    assert not {name for name in written if not any(re.fullmatch(pattern, name) for pattern in patterns)}
    assert all(f"| {reason.value} | `{reason.name}` |" in page for reason in FinishReason)


def test_the_readmes_install_covers_its_runtimes_and_data() -> None:
    (extras,) = re.findall(r"pip install -c constraints.txt -e '\.\[(.*?)\]'", (ROOT / "README.md").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [package for extra in extras.split(",") for package in project["optional-dependencies"][extra]]
    assert {re.split("[^a-z]", package)[0] for package in asked} == {"ray"}


def test_the_page_of_agents_has_every_path_and_every_refused_field() -> None:
    page = (DOCS / "agents.md").read_text()
    assert all(f"`{name}`" in page for name in (*UNSUPPORTED, *USUAL, *LIMITS)) and f"up to {MOST_STOPS}" in page
    assert f"up to {MOST_CHOICES}" in page and all(f"`POST {one.path}`" in page for one in DIALECTS.values())


def test_every_verifier_and_command_is_named_where_one_looks_for_it() -> None:
    rewards = (DOCS / "rewards.md").read_text()
    assert all(f"`{name}`" in rewards for name in VERIFIERS)
    readme = (ROOT / "README.md").read_text()
    names = [
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback and not command.hidden
    ]
    assert all(f"braid {name}" in readme for name in names)


def test_the_flow_that_the_readme_shows_is_the_recipe() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    defaults = {"max_response_tokens": 512, "samples_per_prompt": 8}
    recipe, flow = load_flow("dapo", {}, defaults), eval(shown, vars(braidrl.flow))
    assert flow.edges == recipe.edges
    for mine, theirs in zip(flow.stages[:-1], recipe.stages[:-1], strict=True):
        assert mine == theirs
    # The recipe states explicitly that there is no dual clip.
    assert {**flow.stages[-1].params["loss"], "dual": None} == recipe.stages[-1].params["loss"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_the_pages_has_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
