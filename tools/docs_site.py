"""Add pages from outside docs/ to the documentation site: CONTRIBUTING.md and others, and a page for each module of the
package.

CONTRIBUTING.md, examples/*/README.md, ... ──links rewritten──▶ pages
braidrl/**/*.py ──▶ reference/braidrl/**.md ──mkdocstrings, drawings kept──▶ pages

mkdocs calls the functions that begin with `on_` (hooks in mkdocs.yml). griffe loads the extension.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "braidrl"
DOCS = ROOT / "docs"
EXAMPLES = {
    f"examples/{path.parent.name}/README.md": f"examples/{path.parent.name}.md"
    for path in ROOT.glob("examples/*/README.md")
}
DEVICES = {
    f"benchmarks/results/{path.name}": f"results/{path.name}" for path in ROOT.glob("benchmarks/results/gpu-*.md")
}
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    **EXAMPLES,
    **DEVICES,
}
LANDING = {"README.md": "index.md"}
"""The site has its own landing page instead of the README."""
LINK = re.compile(r"\]\(([^):#]+)(?=[)#])")
"""Matches a link to a file, but not a link with a scheme or within the page."""
DRAWN = re.compile(r"[─│▲▼◀▶┌┐└┘├┤┬┴┼]|\S {3,}\S")
"""Matches a paragraph of a drawing or a table: lines and arrows, or columns."""


def on_config(config: MkDocsConfig) -> None:
    """Fill the navigation sections that depend on the files: results, examples, the reference of the package."""
    assert config.nav is not None
    parts = {name: pages for part in config.nav for name, pages in part.items()}
    parts["Results"] += sorted([*DEVICES.values(), *(f"results/{path.name}" for path in DOCS.glob("results/*.md"))])
    parts["Examples"] += sorted(EXAMPLES.values())
    parts["Reference"].append({"braidrl": contents(PACKAGE)})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the generated pages, and the files outside docs/ that any page links to."""
    for path, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text()))
    for module in modules(PACKAGE):
        files.append(File.generated(config, reference_page(module), content=reference(module)))
    linked = {target for path in documents() for target in targets(path)}
    for target in sorted(linked - {*PAGES, *LANDING}):
        # mkdocs names the page of a broken link.
        if not target.startswith("docs/") and (ROOT / target).is_file():
            files.append(File(target, str(ROOT), config.site_dir, config.use_directory_urls))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the text with links to files of the repository replaced by links to pages of the site."""
    place = page.file.src_uri
    path = next((path for path, known in PAGES.items() if known == place), f"docs/{place}")
    start = posixpath.dirname(place) or "."
    return LINK.sub(lambda found: f"]({posixpath.relpath(in_site(linked(path, found[1])), start)}", markdown)


def documents() -> list[str]:
    """Return the paths of all hand-written pages, from the repository's root."""
    return [*PAGES, *(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))]


def targets(path: str) -> list[str]:
    """Return the paths that a page links to, from the repository's root."""
    return [linked(path, found) for found in LINK.findall((ROOT / path).read_text())]


def linked(path: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def in_site(path: str) -> str:
    """Return the path in the site of a file of the repository."""
    return (PAGES | LANDING).get(path, path.removeprefix("docs/"))


def modules(package: Path) -> list[Path]:
    """Return the files of a package and of its subpackages, `__init__.py` first."""
    return sorted(package.rglob("*.py"), key=lambda path: (path.parent, path.name != "__init__.py", path))


def dotted(module: Path) -> str:
    return ".".join(module.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def reference_page(module: Path) -> str:
    """Return the path of a module's page in the site."""
    path = module.relative_to(ROOT).with_suffix(".md")
    return f"reference/{path.with_name('index.md') if path.stem == '__init__' else path}"


def contents(package: Path) -> list[Any]:
    """Return a package's part of the navigation: its own page, then modules and packages in alphabetical order."""
    entries: list[Any] = [reference_page(package / "__init__.py")]
    for path in sorted(package.iterdir()):
        if (path / "__init__.py").exists():
            entries.append({path.name: contents(path)})
        elif path.suffix == ".py" and path.stem != "__init__":
            entries.append({path.stem: reference_page(path)})
    return entries


def reference(module: Path) -> str:
    """Return a module's page: the output of mkdocstrings, and for a package a table of its modules."""
    text = f"::: {dotted(module)}\n"
    if module.stem != "__init__":
        return text
    inside = [path for path in modules(module.parent) if path != module and is_directly_in(module.parent, path)]
    lines = [f"| [{dotted(path)}][{dotted(path)}] | {purpose(path)} |" for path in inside]
    return "\n".join([text, "| inside | |", "| --- | --- |", *lines, ""]) if lines else text


def is_directly_in(package: Path, path: Path) -> bool:
    return path.parent == package or (path.parent.parent == package and path.name == "__init__.py")


def purpose(module: Path) -> str:
    """Return the first paragraph of a module's docstring, in one line."""
    docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("|", "\\|")


class Drawings(griffe.Extension):
    """Keeps the drawings and tables of docstrings as code blocks."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(kept, obj.docstring.value.split("\n\n")))


def kept(paragraph: str) -> str:
    """Return a paragraph as a code block if it is a drawing."""
    return f"```text\n{paragraph}\n```" if DRAWN.search(paragraph) and "```" not in paragraph else paragraph
