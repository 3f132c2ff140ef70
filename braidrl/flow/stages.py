"""Construction of stages from a type, a role and parameters.

The Python form (`actor.generate()`, `advantage.gae(gamma=1.0)`) and the YAML form both end in `make_stage`, so both
give equal stages.

type                 signature comes from
generate, update...  `signatures.role_signature`
advantage.gae ...    the function registered in braidrl.algorithms
module:function      the user's registered function, or file.py:function
module:Class.method  the user's registered method for the workers of a role
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter
from typing import Any

from braidrl.algorithms import registry
from braidrl.algorithms.registry import Registry
from braidrl.data.token_columns import column_of
from braidrl.errors import UserError
from braidrl.flow import signatures
from braidrl.flow.stage import ALWAYS, Kind, Scope, Signature, Stage, When, default_name


def make_stage(
    type: str,
    role: str | None = None,
    params: Mapping[str, Any] | None = None,
    *,
    id: str | None = None,
    when: When = ALWAYS,
    after: Sequence[str] = (),
) -> Stage:
    """Return a stage of a type in the table above. Raises UserError for an unknown type, role or parameter.

    A parameter that is None is the same as absent. The name `id` is by default role and type. The stage runs in the
    iterations `when`, and after those named in `after` although no column requires it.
    """
    params = {name: plain(type, value) for name, value in (params or {}).items() if value is not None}
    if type in signatures.ROLE_TYPES:
        if role is None:
            raise UserError(f"stage {id or type}: the type {type!r} needs a role, as in `role: actor`")
        signature = signatures.role_signature(type, role, params)
        for parameter, registered in signatures.CHOICES.items() if type == "update" else ():
            if (choice := params.get(parameter)) is not None:
                # Users' functions get names by which another process can import them.
                settings = {"name": choice} if isinstance(choice, str) else choice
                name = signatures.public_name(signatures.entry_of(registered, settings["name"]), settings["name"])
                is_name = parameter == "aggregate" and isinstance(choice, str)
                params[parameter] = name if is_name else {**settings, "name": name}
        if "columns" in params:
            params["columns"] = [signatures.public_name(column_of(name), name) for name in params["columns"]]
    elif role is not None and ":" in type:
        signature = signatures.method_signature(type, params)
    else:
        entry = signatures.compute_entry(type, also=signatures.ROLE_TYPES)
        type = signatures.public_name(entry, type)
        if role is not None:
            raise UserError(f"stage {id or type}: the type {type!r} is no model's; remove `role: {role}`")
        of = params.get("of")
        if of is not None and not (isinstance(of, str) and of.isidentifier()):
            raise UserError(f"{type}: of must be a plain name, as in `of: rival`, got {of!r}")
        try:
            entry.check({name: value for name, value in params.items() if name != "of"})
            state = {name: float(params.get(name, value)) for name, value in entry.state.items()}
        except (ValueError, TypeError) as error:
            raise UserError(f"{type}: {error}") from None
        selects = registry.selections.get(entry.name) is entry
        signature = Signature(
            kind=Kind.SELECT if selects else Kind.COMPUTE,
            reads=signatures.read_in_namespace(of, [entry.column(p) for p in entry.reads]),
            writes=signatures.read_in_namespace(of, entry.writes),
            optional=signatures.read_in_namespace(of, [entry.column(p) for p in entry.optional]),
            scope=Scope(entry.scope),
            state=state,
        )
    return Stage(id or default_name(type, role, params), type, role, params, when, tuple(after), **vars(signature))


def plain(type: str, value: Any) -> Any:
    """Return a deep copy of a plain value, as YAML would load it. Raises UserError for any other object."""
    if isinstance(value, Mapping):
        return {str(name): plain(type, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(type, item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"{type}: parameters are numbers, texts, lists and mappings, not {value!r}; name a function by module:function"
    )


def with_params(stage: Stage, params: Mapping[str, Any]) -> Stage:
    """Return the stage with these parameters added or replaced."""
    params = {**stage.params, **params}
    changed = make_stage(stage.type, stage.role, params, id=stage.name, when=stage.when, after=stage.after)
    return replace(changed, name=stage.name)


OF = Parameter("of", Parameter.KEYWORD_ONLY, default=None, annotation=str | None)
"""The namespace whose columns a stage without a model reads and writes."""


class RegisteredNames:
    """A registry as attributes: each name is a function of its settings, with signature and docstring.

    Attributes of a `family` make stages: `advantage.gae(gamma=1.0)` is a stage of type `advantage.gae`. Others make
    parameters of an update: `loss.clip(low=0.2)` is `{"name": "clip", "low": 0.2}`, as in YAML.
    """

    def __init__(self, registered: Registry, family: str | None = None, also: Sequence[Parameter] = ()) -> None:
        """Offer the names of a registry as attributes.

        `also` are settings besides the function's own, for the update.
        """
        of_stages = inspect.signature(make_stage).parameters.values()
        self.registered, self._family = registered, family
        self._also = (
            [parameter for parameter in of_stages if parameter.kind is Parameter.KEYWORD_ONLY] if family else also
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def made(**settings: Any) -> Any:
            if self._family is None:
                return {"name": name, **settings}
            of_stage = {
                parameter.name: settings.pop(parameter.name) for parameter in self._also if parameter.name in settings
            }
            return make_stage(f"{self._family}.{name}", None, settings, **of_stage)

        if name in self.registered:
            made.__name__ = made.__qualname__ = name
            made.__doc__ = inspect.getdoc(self.registered[name].function)
            made.__signature__ = self.signature(name)  # type: ignore[attr-defined]
        return made

    def __dir__(self) -> list[str]:
        return list(self.registered)

    def signature(self, name: str) -> inspect.Signature:
        """Return the signature of an attribute: its settings, its state's initial values, and common parameters."""
        entry = self.registered[name]
        parameters = inspect.signature(entry.function).parameters
        settings = [parameters[setting] for setting in entry.settings]
        state = [
            Parameter(setting, Parameter.KEYWORD_ONLY, default=value, annotation=float)
            for setting, value in entry.state.items()
        ]
        returns = Stage if self._family else dict[str, Any]
        namespace = [OF] if self._family else []
        return inspect.Signature([*settings, *state, *namespace, *self._also], return_annotation=returns)
