"""Stand-ins for packages that are not installed on a GPU machine.

The stand-in of pydantic holds the configuration's defaults and the given values, and checks nothing. The stand-in of msgspec
is a class without behaviour: nothing sends messages here.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

MISSING: Any = object()


class FieldInfo:
    """A key's default."""

    def __init__(self, default: Any = MISSING, default_factory: Callable[[], Any] | None = None) -> None:
        self.default, self.default_factory = default, default_factory

    def value(self) -> Any:
        return copy(self.default) if self.default_factory is None else self.default_factory()


def field(default: Any = MISSING, *, default_factory: Callable[[], Any] | None = None, **_: Any) -> Any:
    return FieldInfo(default, default_factory)


def unchecked(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function


class BaseModel:
    """Keys with defaults, in nested sections."""

    model_fields: typing.ClassVar[dict[str, FieldInfo]] = {}

    def __init_subclass__(cls) -> None:
        own = {name: getattr(cls, name, MISSING) for name in inspect.get_annotations(cls) if name != "short_for"}
        made = {name: value if isinstance(value, FieldInfo) else FieldInfo(value) for name, value in own.items()}
        cls.model_fields = {**cls.model_fields, **made}

    def __init__(self, **given: Any) -> None:
        hints = typing.get_type_hints(type(self))
        for name, known in self.model_fields.items():
            value = given[name] if name in given else known.value()
            setattr(self, name, converted(hints.get(name), value))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(str(vars(self)))

    @classmethod
    def model_validate(cls, tree: Mapping[str, Any]) -> Any:
        return cls(**tree)

    def model_copy(self, update: Mapping[str, Any] | None = None) -> Any:
        made = copy(self)
        vars(made).update(update or {})
        return made


def converted(hint: Any, value: Any) -> Any:
    """Return a dict as the section that it stands for, and a text as the path."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict and isinstance(value, dict):
        return {name: converted(inner[1], part) for name, part in value.items()}
    for kind in inner if origin in (typing.Union, types.UnionType) else (hint,):
        if isinstance(kind, type) and isinstance(value, dict) and issubclass(kind, BaseModel):
            return kind(**value)
        if kind is Path and isinstance(value, str):
            return Path(value)
    return value


class Struct:
    """Stand-in of `msgspec.Struct`, whose subclasses take settings."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__()


def stand_in() -> None:
    """Register stand-ins for packages that are not installed."""
    if importlib.util.find_spec("msgspec") is None:
        messages: Any = types.ModuleType("msgspec")
        messages.Struct = Struct
        sys.modules["msgspec"] = messages
    if importlib.util.find_spec("pydantic") is not None:
        return
    module: Any = types.ModuleType("pydantic")
    module.BaseModel, module.Field, module.ConfigDict = BaseModel, field, dict
    module.AfterValidator, module.BeforeValidator, module.ValidationError = (
        unchecked,
        unchecked,
        type("ValidationError", (ValueError,), {}),
    )
    module.field_validator = module.model_validator = unchecked
    sys.modules["pydantic"] = module
