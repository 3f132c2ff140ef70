"""The one function that makes a stage from a type, a role and parameters.

The Python form (`actor.generate()`, `advantage.gae(gamma=1.0)`) and the YAML form both end in `make_stage`, so both give equal stages.

type                 signature comes from
generate, update...  `signatures.ROLE_TYPES`
advantage.gae ...    the function registered in braidrl.algorithms
module:function      the user's registered function, or file.py:function
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from braidrl.algorithms import registry
from braidrl.algorithms.registry import Registry
from braidrl.errors import UserError
from braidrl.flow.lookup import FAMILIES, compute_entry, entry_of, public_name
from braidrl.flow.signatures import CHOICES, ROLE_TYPES, compute_signature, role_signature
from braidrl.flow.stage import ALWAYS, Stage, When, default_name


def make_stage(
    type: str,
    role: str | None = None,
    params: Mapping[str, Any] | None = None,
    *,
    id: str | None = None,
    when: When = ALWAYS,
    after: Sequence[str] = (),
) -> Stage:
    """Return a stage by its type's name. Raises UserError for a type, role or parameter that does not exist.

    Args:
        type: As in the table above.
        role: Of a type that is a model's.
        params: Parameters of the type; those that are None are left out.
        id: The stage's name; by default its role and type.
        when: The iterations in which it runs.
        after: Names of stages that it comes after, where no column says so.
    """
    params = {name: plain(type, value) for name, value in (params or {}).items() if value is not None}
    if type in ROLE_TYPES:
        if role is None:
            raise UserError(f"stage {id or type}: the type {type!r} needs a role, as in `role: actor`")
        signature = role_signature(type, role, params)
        params = with_public_names(params) if type == "update" else params
    else:
        entry = compute_entry(type, also=ROLE_TYPES)
        type = public_name(entry, type)
        if role is not None:
            raise UserError(f"stage {id or type}: the type {type!r} is no model's; remove `role: {role}`")
        signature = compute_signature(type, entry, params)
    return Stage(id or default_name(type, role, params), type, role, signature, params, when, tuple(after))


def with_public_names(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return an update's parameters with users' losses and the like named so that another process can import them."""
    named = dict(params)
    for parameter, registered in CHOICES.items():
        choice = params.get(parameter)
        if isinstance(choice, str):
            named[parameter] = public_name(entry_of(registered, choice), choice)
        elif choice is not None:
            name = public_name(entry_of(registered, choice["name"]), choice["name"])
            named[parameter] = {**choice, "name": name}
    return named


def plain(type: str, value: Any) -> Any:
    """Return the value as YAML would give it back, nothing shared with the caller's. Raises UserError for any other object."""
    if isinstance(value, Mapping):
        return {str(name): plain(type, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(type, item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"{type}: parameters are numbers, texts, lists and mappings, not {value!r}; name a function by module:function"
    )


class StageFamily:
    """`advantage.gae(gamma=1.0)` makes the stage of type `advantage.gae`; any registered name is an attribute."""

    def __init__(self, family: str) -> None:
        self._family = family

    def __getattr__(self, name: str) -> Callable[..., Stage]:
        if name.startswith("__"):
            raise AttributeError(name)

        def stage(*, id: str | None = None, when: When = ALWAYS, after: Sequence[str] = (), **params: Any) -> Stage:
            return make_stage(f"{self._family}.{name}", None, params, id=id, when=when, after=after)

        return stage

    def __dir__(self) -> list[str]:
        return list(FAMILIES[self._family])


class ValueFamily:
    """`loss.clip(low=0.2)` is the value `{"name": "clip", "low": 0.2}`, the same that YAML spells out."""

    def __init__(self, registered: Registry) -> None:
        self._registered = registered

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        if name.startswith("__"):
            raise AttributeError(name)

        def value(**settings: Any) -> dict[str, Any]:
            return {"name": name, **settings}

        return value

    def __dir__(self) -> list[str]:
        return list(self._registered)


advantage = StageFamily("advantage")
shape = StageFamily("shape")
select = StageFamily("select")
data = StageFamily("data")
loss = ValueFamily(registry.losses)
kl = ValueFamily(registry.divergences)
correction = ValueFamily(registry.corrections)
