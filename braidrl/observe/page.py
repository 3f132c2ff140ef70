"""The shell of an HTML page that needs nothing but itself: styles, scripts and data are inside."""

import html
import json
from importlib.resources import files
from typing import Any

PALETTE_SIZE = 12
"""Colours `--c0`, `--c1`, ... of page.css, in light and dark."""


def colour(number: int) -> str:
    """The CSS value of the palette's colour `number`; after the last they begin again."""
    return f"var(--c{number % PALETTE_SIZE})"


def escape(text: object) -> str:
    """Text as it must stand in HTML, inside an element or in a quoted attribute."""
    return html.escape(str(text), quote=True)


def embed(data: Any) -> str:
    """Data for a script as an element. No `<` stays, so that no text in it can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def asset(name: str) -> str:
    """A style or script that comes with the package."""
    return files("braidrl.observe").joinpath("assets", name).read_text(encoding="utf-8")


def page(title: str, body: str, script: str | None = None) -> str:
    """Return a whole HTML document; `body` is HTML, `script` the name of an asset."""
    code = f"<script>\n{asset(script)}</script>\n" if script else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{asset('page.css')}</style>\n</head>\n"
        f"<body>\n{body}\n{code}</body>\n</html>\n"
    )


def tile(label: str, value: str, detail: str = "") -> str:
    """A headline number."""
    return (
        f'<div class="tile"><div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>'
        f'<div class="detail">{escape(detail)}</div></div>'
    )
