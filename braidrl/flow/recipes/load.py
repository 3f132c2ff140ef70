"""From the name in a configuration to a flow: a recipe of ours, a YAML file, or a user's own function."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from braidrl.errors import UserError, suggest
from braidrl.flow.flow import Flow
from braidrl.flow.recipes.dapo import dapo
from braidrl.flow.recipes.grpo import grpo
from braidrl.flow.recipes.ppo import ppo
from braidrl.flow.recipes.sft import sft
from braidrl.flow.yaml_form import SUFFIXES, from_yaml
from braidrl.importing import import_function

RECIPES: dict[str, Callable[[Any], Flow]] = {recipe.__name__: recipe for recipe in (dapo, grpo, ppo, sft)}


def load_flow(name: str, params: Mapping[str, Any] | None = None, defaults: Mapping[str, Any] | None = None) -> Flow:
    """The flow that `name` stands for: a recipe, a .yaml file, `module:function` or `file.py:function`.

    `params` are the recipe's parameters; `defaults` fill those of its fields that are not set, and are otherwise ignored. Raises UserError
    for a name, a parameter or a value that does not exist or is out of its range.
    """
    params, defaults = dict(params or {}), dict(defaults or {})
    if name.endswith(SUFFIXES):
        if params:
            raise UserError(f"{name} is a YAML flow and takes no parameter {next(iter(params))!r}; set it in the file")
        return from_yaml(name)
    if ":" not in name and name not in RECIPES:
        raise UserError(f"no recipe is called {name!r}. {suggest(name, RECIPES)}")
    recipe = import_function(name) if ":" in name else RECIPES[name]
    flow = call_recipe(name, recipe, params, defaults)
    if not isinstance(flow, Flow):
        raise UserError(f"{name} must return a Flow, not {type(flow).__name__}")
    return flow


def call_recipe(name: str, recipe: Callable[..., Any], params: dict[str, Any], defaults: dict[str, Any]) -> Any:
    """What the recipe returns for parameters checked by the model that its only argument is annotated with."""
    model = parameter_model(name, recipe)
    if model is None:
        if params:
            raise UserError(f"recipe {name} takes no parameters, got {next(iter(params))!r}")
        return recipe()
    known = {key: value for key, value in defaults.items() if key in model.model_fields}
    try:
        checked = model.model_validate({**known, **params})
    except ValidationError as error:
        raise UserError(f"recipe {name}: {explain(error, model)}") from None
    return recipe(checked)


def parameter_model(name: str, recipe: Callable[..., Any]) -> type[BaseModel] | None:
    """The pydantic model of a recipe's parameters; None for a function without arguments."""
    try:
        hints = typing.get_type_hints(recipe)
    except NameError as error:
        raise UserError(f"recipe {name}: its annotation cannot be read: {error}") from None
    arguments = list(inspect.signature(recipe).parameters)
    if not arguments:
        return None
    model = hints.get(arguments[0])
    if len(arguments) > 1 or not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise UserError(f"recipe {name} must take nothing, or one argument annotated with a pydantic model")
    return model


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line for the first thing that is wrong."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"no parameter is called {place!r}. {suggest(place, model.model_fields)}"
    if first["type"] == "missing":
        return f"the parameter {place!r} is not set"
    if not place:
        return str(first["msg"]).removeprefix("Value error, ")
    return f"{place}: {first['msg']}, got {first['input']!r}"
