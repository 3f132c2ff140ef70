"""Lookup of registered functions by name, and names that are valid in other processes."""

import sys
from collections.abc import Iterable

import braidrl.algorithms.library  # noqa: F401  (registers what comes with Braid)
from braidrl.algorithms import registry
from braidrl.algorithms.registry import Entry, Registry
from braidrl.errors import UserError, suggest
from braidrl.importing import LOADED_FROM_FILE, import_function

FAMILIES: dict[str, Registry] = {
    "advantage": registry.advantages,
    "shape": registry.shapes,
    "select": registry.selections,
    "data": registry.responses,
}


def compute_entry(type: str, also: Iterable[str] = ()) -> Entry:
    """Return the registered function of a compute or select stage's type. Raises UserError for an unknown type.

    `also` are other valid types, for the hint in the message.
    """
    if ":" in type:
        return by_function(type, *FAMILIES.values())
    family, _, name = type.partition(".")
    if family not in FAMILIES:
        known = [*also, *(f"{f}.{n}" for f, registered in FAMILIES.items() for n in registered)]
        raise UserError(f"no stage type is called {type!r}. {suggest(type, known)}")
    return entry_of(FAMILIES[family], name)


def entry_of(registered: Registry, name: str) -> Entry:
    """Return the entry with a registered name or `module:function`. Raises UserError for an unknown name."""
    if ":" in name:
        return by_function(name, registered)
    try:
        return registered[name]
    except KeyError as error:
        raise UserError(str(error.args[0])) from None


def by_function(name: str, *registries: Registry) -> Entry:
    """Return the entry of the function `module:function`. Raises UserError if it is not registered in these registries."""
    function = import_function(name)
    found = [e for registered in registries for e in registered.entries.values() if e.function is function]
    if not found:
        families = " or ".join(registered.family for registered in registries)
        raise UserError(f"{name} is no registered {families}; put the family's decorator above the function")
    if len(found) > 1:
        raise UserError(
            f"{name} is registered as {' and '.join(e.name for e in found)}; give each a function of its own"
        )
    return found[0]


def public_name(entry: Entry, name: str) -> str:
    """Return `name` for a built-in function, and `module:function` or `file.py:function` for a user's function.

    The Python and the YAML form are then equal, and another process can import the function.
    """
    module = sys.modules.get(entry.function.__module__)
    if module is None or module.__name__.startswith("braidrl."):
        return name
    attribute = entry.function.__name__
    if getattr(module, attribute, None) is not entry.function:
        return name
    by_file = module.__name__ == "__main__" or module.__name__.startswith(LOADED_FROM_FILE)
    return f"{module.__file__ if by_file else module.__name__}:{attribute}"
