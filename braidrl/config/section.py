"""The base of every part of the configuration."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

DType = Literal["float32", "bfloat16", "float64"]
ONE_OR_MORE = BeforeValidator(lambda value: value if value is None or isinstance(value, list) else [value])
"""By which one value is short for a list of it."""


class Section(BaseModel):
    """A part of the configuration; refuses keys that it does not have."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())
    short_for: ClassVar[Mapping[type, str]] = {}
    """The key that a bare value of a type is short for, with nothing else set."""

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, value: Any) -> Any:
        key = next((key for kind, key in cls.short_for.items() if isinstance(value, kind)), None)
        return value if key is None else {key: value}
