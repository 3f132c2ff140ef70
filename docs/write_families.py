"""Write braidrl/flow/families.pyi from the registries: python docs/write_families.py"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from pathlib import Path

from braidrl.flow import families
from braidrl.flow.stages import RegisteredNames

PAGE = Path(inspect.getfile(families)).with_suffix(".pyi")
NO_BREAK = "\u00a0"
HEAD = '''"""What `families.py` offers, for editors and type checkers; written by `docs/write_families.py`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from braidrl.flow.stage import Stage, When
'''


def page() -> str:
    """Return the whole stub."""
    found = {name: family for name, family in vars(families).items() if isinstance(family, RegisteredNames)}
    classes = [class_of(name, family) for name, family in found.items()]
    return HEAD + "".join(classes) + "\n" + "".join(f"{name}: {class_name(name)}\n" for name in found)


def class_name(family: str) -> str:
    """Return the name of a family's class in the stub."""
    return f"{family.capitalize()}Names"


def class_of(name: str, family: RegisteredNames) -> str:
    """Return a family's class, with a method for each name; a user's own name may be any function."""
    methods = [method(entry, family) for entry in family.registered if belongs(entry, family)]
    returns = annotated(family.signature(next(iter(family.registered))).return_annotation)
    own = f"    def __getattr__(self, name: str) -> Callable[..., {returns}]: ...\n"
    return f"\nclass {class_name(name)}:\n{''.join(methods)}{own}"


def belongs(name: str, family: RegisteredNames) -> bool:
    """Return False for entries of other programs, and for names such as `k3+`, which cannot be attributes."""
    return name.isidentifier() and family.registered[name].function.__module__.startswith("braidrl.")


def method(name: str, family: RegisteredNames) -> str:
    """Return one entry as a method, with its docstring."""
    signature = family.signature(name)
    parameters = [
        f"{parameter.name}: {annotated(parameter.annotation)}{default_of(parameter)}"
        for parameter in signature.parameters.values()
    ]
    given = "self"
    if parameters:
        # A line ends only between parameters.
        unbroken = " ".join(f"{parameter.replace(' ', NO_BREAK)}," for parameter in ["self", "*", *parameters])
        lines = textwrap.wrap(unbroken[:-1], 104, break_long_words=False, break_on_hyphens=False)
        given = "\n" + "".join(f"        {line}\n".replace(NO_BREAK, " ") for line in lines) + "    "
    doc = inspect.getdoc(getattr(family, name)) or ""
    # Indented lines are an example.
    paragraphs = [text if "\n " in text else textwrap.fill(text, 105) for text in doc.split("\n\n")]
    doc = "\n\n".join(paragraphs)
    lines = [f"        {line}".rstrip() + "\n" for line in doc.splitlines()]
    end = '        """\n' if len(lines) > 1 else ""
    text = "".join(lines)[8:] if end else doc + '"""\n'
    return f'    def {name}({given}) -> {annotated(signature.return_annotation)}:\n        """{text}{end}\n'


def default_of(parameter: inspect.Parameter) -> str:
    """Return the text after a parameter's type: its default, if that is a plain value."""
    if parameter.default is parameter.empty:
        return ""
    if isinstance(parameter.default, str):
        return f" = {json.dumps(parameter.default)}"
    return f" = {parameter.default!r}" if isinstance(parameter.default, int | float | None) else " = ..."


def annotated(annotation: object) -> str:
    """Return a type in the stub's notation."""
    return re.sub(
        r"\b(typing|collections\.abc|braidrl\.flow\.stage)\.", "", inspect.formatannotation(annotation)
    ).replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(page())
