"""Everything that the pages tell a reader to type exists: commands with their flags, and configuration keys with valid
values.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer
import yaml
from pydantic import BaseModel

from braidrl.cli.commands import app
from braidrl.config import Config, parse_config
from braidrl.config.reading import apply_override
from braidrl.errors import UserError
from braidrl.flow.recipes import RECIPES, load
from tests.examples.test_documentation import PAGES
from tests.tiny import ROOT

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SECTIONS = "algorithm|data|reward|rollout|trainer|evaluation|roles|cluster|streaming"
KEY = re.compile(rf"(?<![\w.:/-])(?:{SECTIONS})(?:\.\w+)+(?![\w(:/]|\.\w)(?<!\.py)(?<!\.md)(?<!\.yaml)")
OF_NAMES = ("streaming.workers.", "rollout.vllm.")
"""Sections whose names may have dots, or whose names come from other libraries."""
STAGES = {"reward.score", "data.join", "algorithm.scale", "trainer.stepz"}
"""Calls of flow stages that look like keys, a recipe's setting that a page writes, and a deliberate mistake."""
MISTAKE = "trainer.stepz=3"
"""Shown together with their error message."""


def code(page: Path) -> Iterator[str]:
    """Return the code on a page: indented or fenced lines, and words in backticks."""
    text = page.read_text()
    if page.name.startswith("coming-from"):
        text = re.sub(
            r"^\| .*? \|", "|", text, flags=re.MULTILINE
        )  # The first column has the keys of other frameworks.
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        yield from block.splitlines()
    text = re.sub(r"```\w*\n.*?```", "", text, flags=re.DOTALL)
    yield from re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", text)


def commands(page: Path) -> Iterator[list[str]]:
    """Return the words after `braid` in each command on a page."""
    for line in code(page):
        for command in re.findall(r"(?:^|[$ ])braid ([a-z]+\b[^|&;#]*)", line):
            try:
                yield shlex.split(command)
            except ValueError:
                yield command.split()


def fields(section: object) -> dict[str, object]:
    """Return the keys of a section of the configuration; `*` stands for names that the reader chooses."""
    if isinstance(section, type) and issubclass(section, BaseModel):
        return {name: field.annotation for name, field in section.model_fields.items()}
    if getattr(section, "__origin__", None) is dict:
        return {"*": get_args(section)[1]}
    return {name: value for part in get_args(section) for name, value in fields(part).items()}


def known(key: str) -> bool:
    """Return whether the configuration has a key."""
    first, *rest = key.split(".")
    if rest and rest[0].isupper():
        return True
    if first == "algorithm":
        return any(rest[0] in parameters for parameters in RECIPE_KEYS)
    section: object = Config
    for part in [first, *rest]:
        inside = fields(section)
        if not inside:
            return key.startswith(OF_NAMES)
        if part not in inside and "*" not in inside:
            return key.startswith(OF_NAMES)
        section = inside.get(part, inside.get("*"))
    return True


def recipe_keys() -> list[set[str]]:
    models = [load.parameter_model(name, RECIPES.find(name)) for name in load.NAMES]
    return [set(model.model_fields) for model in models if model is not None]


RECIPE_KEYS = recipe_keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_flags_and_keys_of_a_page_exist(page: Path) -> None:
    for name, *words in commands(page):
        assert name in COMMANDS, f"braid {name}"
        flags = {flag for option in COMMANDS[name].params for flag in option.opts} | {"--help", "--debug"}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= flags, (name, words)
        for word in words:
            own = word.startswith("algorithm.") and any(".py:" in other for other in words)
            if re.fullmatch(r"[a-z_]+(\.\w+)*=.*", word) and not own and word != MISTAKE:
                assert refusal(word) is None, refusal(word)
    assert not {key for line in code(page) for key in KEY.findall(line) if not known(key)} - STAGES


def test_files_and_tests_that_pages_run_by_pytest_exist() -> None:
    lines = [line for page in (*PAGES, *ROOT.glob("docs/results/*.md")) for line in code(page)]
    for words in (line.split() for line in lines if re.match(r"(\.venv/bin/)?pytest ", line)):
        files = [ROOT / word for word in words if word.startswith("tests/")]
        texts = [path.read_text() for path in files if path.suffix == ".py"]
        expected = rf"def test_\w*{words[words.index('-k') + 1]}" if "-k" in words else "def test_"
        assert all(path.exists() for path in files) and (not texts or re.search(expected, "".join(texts))), words


def refusal(override: str) -> str | None:
    """Return the configuration's refusal of `key=value`, or nothing for a placeholder."""
    key, _, value = override.partition("=")
    if not known(key):
        return f"no key {key}"
    if re.search(r"[A-Z]|\.\.\.|…", value) or key.startswith("algorithm."):
        return None
    tree = {"flow": "grpo", "model": "m", "data": {"train": "a.jsonl"}}
    try:
        apply_override(tree, override)
        parse_config(yaml.safe_load(yaml.safe_dump(tree)))
    except UserError as error:
        return str(error)
    return None
