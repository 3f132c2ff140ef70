"""Users' own functions by name: `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from braidrl.errors import UserError, suggest


def import_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` or `file.py:function` names. Raises UserError when there is none."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise UserError(f"{name!r} names no function; write module:function or path/to/file.py:function")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"{place} has no function {attribute!r}. {suggest(attribute, _functions(module))}")
    return function


def _functions(module: ModuleType) -> list[str]:
    return [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"cannot import {name!r} ({error}); is its folder on PYTHONPATH?") from None


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise UserError(f"no file {path}")
    # The name follows from the path, so that a second import and another process find the same module.
    name = f"braid_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
