"""The documentation site builds without a warning, has every public name of the package, and loads nothing from
elsewhere.
"""

from __future__ import annotations

import ast
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.tiny import ROOT, load_module

pytestmark = pytest.mark.soak
pages = load_module(ROOT / "tools" / "docs_site.py")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


def public_names(body: list[ast.stmt], place: str) -> Iterator[str]:
    """Return the public names of a module or class, and those of its classes."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names = [node.name]
            case ast.Assign():
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                names = []
        for name in names:
            if not name.startswith("_"):
                yield f"{place}.{name}"
                if isinstance(node, ast.ClassDef):
                    yield from public_names(node.body, f"{place}.{name}")


def test_every_public_name_of_the_package_is_on_a_page(site: Path) -> None:
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    shown = {line.split()[0] for line in inventory.splitlines()}
    modules = pages.modules(ROOT / "braidrl")
    expected = {pages.dotted(path) for path in modules}
    for path in modules:
        expected |= set(public_names(ast.parse(path.read_text()).body, pages.dotted(path)))
    assert len(expected) > 1000
    assert not expected - shown


def test_every_page_written_by_hand_is_in_the_site(site: Path) -> None:
    written = [pages.in_site(path) for path in pages.documents()]
    assert all((site / path).with_suffix(".html").exists() for path in written)


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    # The theme's script loads mermaid from another host for pages with an element of that class.
    loaded = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(https?:[^ ">]+)|class="?(mermaid)\b')
    assert not [(page, result) for page in site.rglob("*.html") for result in loaded.findall(page.read_text())]


def test_drawings_and_tables_in_docstrings_stay_as_they_are() -> None:
    assert pages.kept("a ──rows──▶ b") == "```text\na ──rows──▶ b\n```"
    assert pages.kept("one   the first\ntwo   the second").startswith("```text")
    assert pages.kept("Args:\n    one: The first.") == "Args:\n    one: The first."
