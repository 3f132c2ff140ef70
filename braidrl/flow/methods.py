"""Stages that call a method of a user's class, `methods.py:Surprise.surprise`, registered with the columns that it reads and writes."""

import inspect
from collections.abc import Mapping
from typing import Any

from braidrl.errors import UserError, suggest
from braidrl.flow.stage import Kind, Signature
from braidrl.importing import import_function


def is_method(type: str, role: str | None) -> bool:
    """Return True if a stage's type names a method of a user's class."""
    return role is not None and ":" in type


def class_and_method(type: str) -> tuple[Any, str]:
    """Return the class and the method's name of `module:Class.method`. Raises UserError for an unknown class."""
    place, _, method = type.rpartition(".")
    if ":" not in place:
        raise UserError(f"{type} names no method; write module:Class.method or path/to/file.py:Class.method")
    return import_function(place), method


def registration_of(owner: Any, method: str) -> Any:
    """Return the registration of a class's method. Raises UserError for a method without a protocol."""
    found = getattr(getattr(owner, method, None), "registration", None)
    if found is None:
        known = [name for name in dir(owner) if hasattr(getattr(owner, name), "registration")]
        raise UserError(
            f"{owner.__name__} has no method {method!r} with @register(protocol=...) above it. {suggest(method, known)}"
        )
    return found


def method_signature(type: str, params: Mapping[str, Any]) -> Signature:
    """Return the signature of a method stage. Raises UserError if the method writes nothing or lacks a parameter."""
    owner, method = class_and_method(type)
    registration = registration_of(owner, method)
    if not registration.writes:
        raise UserError(f"{type}: a stage writes columns, and this method none; register it with writes=(...)")
    _, _, *parameters = inspect.signature(getattr(owner, method)).parameters
    for name in params:
        if name not in parameters:
            raise UserError(f"{type} has no parameter {name!r}. {suggest(name, parameters)}")
    return Signature(Kind.INFER, registration.reads, registration.writes)
