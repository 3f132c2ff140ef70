"""Loading of flows by name: a built-in recipe, a YAML file, or a user's own function."""

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from braidrl.errors import UserError, suggest, where_raised
from braidrl.flow.flow import Flow, loss_of
from braidrl.flow.signatures import compute_entry
from braidrl.flow.yaml_form import SUFFIXES, from_yaml
from braidrl.importing import PluginRegistry

NAMES = (
    "cispo",
    "dapo",
    "distillation",
    "dpo",
    "dr_grpo",
    "grpo",
    "gspo",
    "maxrl",
    "ppo",
    "ppo_ptx",
    "reinforce_plus_plus",
    "remax",
    "reward_model",
    "rloo",
    "safe_rlhf",
    "sft",
    "vapo",
)
VARIANTS = {"ppo_ptx": "ppo"}
"""Recipes in the file of another one."""
RECIPES = PluginRegistry("recipe", {name: f"braidrl.flow.recipes.{VARIANTS.get(name, name)}:{name}" for name in NAMES})


def load_flow(name: str, params: Mapping[str, Any] | None = None, defaults: Mapping[str, Any] | None = None) -> Flow:
    """Load a flow by name: a recipe, a .yaml file, `module:function` or `file.py:function`.

    `params` are the recipe's parameters. `defaults` are for its unset fields; names that it does not have are ignored.
    Raises UserError for an unknown name or parameter, or an invalid value.
    """
    params, defaults = dict(params or {}), dict(defaults or {})
    if name.endswith(SUFFIXES):
        if params:
            key = next(iter(params))
            raise UserError(
                f"{name} is a YAML flow and takes no algorithm.{key}; remove it, or write {key} at its stage in the "
                "file"
            )
        flow = from_yaml(name)
    else:
        recipe = RECIPES.find(name)
        model = parameter_model(name, recipe)
        if model is None and params:
            raise UserError(f"recipe {name} takes no parameters, got {next(iter(params))!r}")
        arguments = list[BaseModel]()
        if model is not None:
            usable = {key: value for key, value in defaults.items() if key in model.model_fields}
            try:
                arguments.append(model.model_validate({**usable, **params}))
            except ValidationError as error:
                raise UserError(f"recipe {name}: {explain(error, model)}") from None
        try:
            flow = recipe(*arguments)
        except UserError:
            raise
        except Exception as error:
            if name in RECIPES:
                raise
            raise UserError(f"recipe {name} raised {type(error).__name__}: {error} ({where_raised(error)})") from error
        if not isinstance(flow, Flow):
            raise UserError(f"{name} must return a Flow, not {type(flow).__name__}")
    if "samples_per_prompt" in defaults:
        check_group_size(flow, defaults["samples_per_prompt"])
    return flow


def check_group_size(flow: Flow, samples: int) -> None:
    """Raise UserError if a function of the flow needs more samples per prompt than `samples`."""
    for stage in flow.stages:
        if stage.role is None:
            entry, settings = compute_entry(stage.type), stage.settings
        elif "loss" in stage.params:
            entry, settings = loss_of(stage), stage.params["loss"]
        else:
            continue
        needed = entry.needs.group_size
        least = needed if isinstance(needed, int) else needed({**entry.settings, **settings})
        if samples < least:
            raise UserError(
                f"stage {stage.name}: {entry.name} needs at least {least} samples per prompt, there are {samples}; "
                "raise rollout.samples_per_prompt"
            )


def parameter_model(name: str, recipe: Callable[..., Any]) -> type[BaseModel] | None:
    """Return the pydantic model of a recipe's parameters, or None for a recipe without arguments."""
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
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        models = {name: parameter_model(name, RECIPES.find(name)) for name in NAMES}
        roles = [name for name, section in models.items() if section is not None and path in section.model_fields]
        if roles:
            return f"no parameter is called {path!r}, which is one of {', '.join(roles[:3])}; remove algorithm.{path}"
        return f"no parameter is called {path!r}. {suggest(path, model.model_fields)}"
    if first["type"] == "missing":
        return f"the parameter {path!r} is not set"
    if not path:
        return str(first["msg"]).removeprefix("Value error, ")
    return f"{path}: {first['msg']}, got {first['input']!r}"
