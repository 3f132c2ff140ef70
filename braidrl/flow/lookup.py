"""Finding a registered function by the name that a flow gives it, and the name by which another process finds it again."""

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
    """Return the function behind a compute or select stage's type. Raises UserError when there is none.

    `also` are other types, known to the caller, that the user may have meant.
    """
    if ":" in type:
        return by_function(type, *FAMILIES.values())
    family, _, name = type.partition(".")
    if family not in FAMILIES:
        known = [*also, *(f"{f}.{n}" for f, registered in FAMILIES.items() for n in registered)]
        raise UserError(f"no stage type is called {type!r}. {suggest(type, known)}")
    return entry_of(FAMILIES[family], name)


def entry_of(registered: Registry, name: str) -> Entry:
    """Return the entry by its registered name or as `module:function`. Raises UserError when there is none."""
    if ":" in name:
        return by_function(name, registered)
    try:
        return registered[name]
    except KeyError as error:
        raise UserError(str(error.args[0])) from None


def by_function(name: str, *registries: Registry) -> Entry:
    """Return the entry whose function `module:function` names. Raises UserError if it is not registered there."""
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
    """Return `name` for what comes with Braid; for a user's function the `module:function` or `file.py:function` behind it.

    So that the Python and the YAML form are equal, and that another process can import what this one registered.
    """
    module = sys.modules.get(entry.function.__module__)
    if module is None or module.__name__.startswith("braidrl."):
        return name
    attribute = entry.function.__name__
    if getattr(module, attribute, None) is not entry.function:
        return name
    by_file = module.__name__ == "__main__" or module.__name__.startswith(LOADED_FROM_FILE)
    return f"{module.__file__ if by_file else module.__name__}:{attribute}"
