"""Write catalogue.md from the registries: python docs/write_catalogue.py"""

from __future__ import annotations

from pathlib import Path

from braidrl.cli.catalogue import KINDS, Listed, catalogue

PAGE = Path(__file__).parent / "catalogue.md"
HEAD = """# Catalogue

    braid list                # everything that a flow or a configuration can name
    braid list losses         # one kind, with settings, columns and sources

B are rows and N action tokens; a column in brackets is read where an earlier stage writes it.
Your own: [extend](extend.md). This page is written by `docs/write_catalogue.py`.
"""


def page() -> str:
    """Return the whole page."""
    return HEAD + "".join(f"\n## {kind}\n\n{table(catalogue(kind))}" for kind in KINDS)


def table(listed: list[Listed]) -> str:
    """Return a kind's table, without columns that are empty in all of its rows."""
    named = [
        ("settings", [", ".join(f"`{name}={default}`" for name, default in one.settings.items()) for one in listed])
    ]
    named.append(("reads", [", ".join(f"`{name}`" for name in one.reads) for one in listed]))
    shown = [(title, cells) for title, cells in named if any(cells)]
    lines = [
        f"| name | what it does |{''.join(f' {title} |' for title, _ in shown)}",
        "|---|---|" + "---|" * len(shown),
    ]
    for number, one in enumerate(listed):
        cells = [f"`{one.name}`", one.about.replace("|", "\\|"), *(column[number] for _, column in shown)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
