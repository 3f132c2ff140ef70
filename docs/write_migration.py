"""Write the tables of coming-from-verl.md and coming-from-trl.md from the lists of keys: python
docs/write_migration.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parent
PAGES = {
    DOCS / "coming-from-verl.md": DOCS.parent / "braidrl" / "cli" / "verl_keys.yaml",
    DOCS / "coming-from-trl.md": DOCS.parent / "braidrl" / "cli" / "trl_keys.yaml",
}
BEGIN, END = "<!-- keys: written by docs/write_migration.py -->", "<!-- end of keys -->"
SHORT = {"actor_rollout_ref.": "a."}


def table(keys: Path) -> str:
    """Return the rows of a list, one table for each heading."""
    rows: dict[str, dict[str, Any]] = yaml.safe_load(keys.read_text(encoding="utf-8"))
    headings = {}
    heading = ""
    for line in keys.read_text(encoding="utf-8").partition("\n\n")[2].splitlines():
        if line.startswith("# "):
            heading = line.removeprefix("# ")
        elif ":" in line:
            headings[yaml.safe_load(line.partition(": {")[0])] = heading
    lines: list[str] = []
    for heading in dict.fromkeys(headings.values()):
        lines += ["", f"### {heading}", "", "| theirs | Braid | note |", "|---|---|---|"]
        for key, row in rows.items():
            if headings[key] == heading:
                to = f"`{row['to']}`" if "to" in row else ""
                lines.append(f"| `{short(key)}` | {to} | {row.get('note', '')} |")
    return "\n".join([*lines, ""])


def short(key: str) -> str:
    """Return a key with the sections that the page abbreviates."""
    for long, name in SHORT.items():
        if key.startswith(long):
            return name + key.removeprefix(long)
    return key


def written(page: Path, keys: Path) -> str:
    """Return a page with its tables."""
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}\n{table(keys)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for page, keys in PAGES.items():
        page.write_text(written(page, keys), encoding="utf-8")
