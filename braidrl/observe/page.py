"""Pages that need nothing but themselves: `page` fills a template of `assets`, which escapes whatever it is given."""

from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

TEMPLATES = Environment(
    loader=PackageLoader("braidrl.observe", "assets"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
    undefined=StrictUndefined,
)  # fmt: skip


class Tile(NamedTuple):
    """A headline number."""

    label: str
    value: str
    detail: str = ""


def page(kind: str, name: str, **content: Any) -> str:
    """Return a whole HTML document.

    Args:
        kind: The template, without `.html`; with the name it makes the page's title.
        name: Of the run.
        content: What the template shows.
    """
    return TEMPLATES.get_template(f"{kind}.html").render(kind=kind, name=name, **content)
