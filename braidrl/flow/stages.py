"""The types of stages, and the one function that makes a stage from a type, a role and parameters.

The Python form (`actor.generate()`, `advantage.gae(gamma=1.0)`) and the YAML form both end in `make_stage`, so both give equal stages.

type                 signature comes from
generate, update...  `role_types`, below
advantage.gae ...    the function registered in braidrl.algorithms
module:function      the user's function, or file.py:function
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from braidrl.algorithms import registry
from braidrl.algorithms.registry import Entry, Registry
from braidrl.errors import UserError, suggest
from braidrl.flow.stage import ALWAYS, Kind, Scope, Signature, Stage, When
from braidrl.importing import import_function

GENERATED = (
    "tokens", "action_mask", "sequence_lengths", "rollout_log_probs", "rollout_versions",
    "length", "action_tokens", "finish_reason", "version",
)  # fmt: skip
SEQUENCE = ("tokens", "action_mask", "sequence_lengths")
LOG_PROBS = {"actor": "old_log_probs", "reference": "ref_log_probs"}
VALUES = {"critic": "values", "cost_critic": "cost_values"}
FAMILIES: dict[str, Registry] = {
    "advantage": registry.advantages,
    "shape": registry.shapes,
    "select": registry.selections,
    "data": registry.responses,
}


def make_stage(
    type: str,
    role: str | None = None,
    params: Mapping[str, Any] | None = None,
    *,
    id: str | None = None,
    when: When = ALWAYS,
    after: Sequence[str] = (),
) -> Stage:
    """A stage by its type's name. Raises UserError for a type, role or parameter that does not exist."""
    params = {name: value for name, value in (params or {}).items() if value is not None}
    if type in ROLE_TYPES:
        if role is None:
            raise UserError(f"stage {id or type!r}: the type {type!r} needs a role, as in `role: actor`")
        signature = ROLE_TYPES[type](role, **_checked(type, params))
        name = f"{role}.{type}" + (f".{params['into']}" if "into" in params else "")
    else:
        signature = compute_signature(compute_entry(type), params, type)
        name = type.rsplit(":", 1)[-1]
    return Stage(id or name, type, role, signature, params, when, tuple(after))


def compute_entry(type: str) -> Entry:
    """The registered function behind a compute stage's type. Raises UserError when there is none."""
    if ":" in type:
        function = import_function(type)
        for family in FAMILIES.values():
            for entry in family.entries.values():
                if entry.function is function:
                    return entry
        raise UserError(
            f"{type}: the function is not registered; put @advantages.register(writes=[...]) or the like above it"
        )
    family_name, _, name = type.partition(".")
    if family_name not in FAMILIES:
        known = [*ROLE_TYPES, *(f"{f}.{n}" for f, r in FAMILIES.items() for n in r)]
        raise UserError(f"no stage type is called {type!r}. {suggest(type, known)}")
    try:
        return FAMILIES[family_name][name]
    except KeyError as error:
        raise UserError(str(error.args[0])) from None


def compute_signature(entry: Entry, params: Mapping[str, Any], type: str) -> Signature:
    """What a registered function reads and writes. Raises UserError for a setting that it lacks."""
    try:
        entry.check(dict(params))
    except ValueError as error:
        raise UserError(f"{type}: {error}") from None
    kind = (
        Kind.SELECT if entry.name in registry.selections and registry.selections[entry.name] is entry else Kind.COMPUTE
    )
    return Signature(
        kind,
        reads=tuple(entry.column(p) for p in entry.reads),
        writes=entry.writes,
        optional=tuple(entry.column(p) for p in entry.optional),
        scope=Scope(entry.scope),
    )


def generate(role: str, into: str | None = None, greedy: bool = False, environment: str | None = None) -> Signature:
    """One trajectory per row; `into` names the namespace of a second one, `greedy` takes the likeliest token."""
    prefix = f"{into}." if into else ""
    return Signature(Kind.GENERATE, ("prompt", "prompt_length", "metadata"), tuple(prefix + c for c in GENERATED))


def verify(
    role: str,
    rewards: Sequence[Any] | None = None,
    correct_score: float | None = None,
    wrong_score: float | None = None,
    of: str | None = None,
) -> Signature:
    """Rule rewards: `score` and `correct` of each verifier, weighted into `reward`."""
    prefix = f"{of}." if of else ""
    reads = ("prompt", "metadata", f"{prefix}tokens", f"{prefix}action_mask")
    return Signature(Kind.COMPUTE, reads, tuple(prefix + c for c in ("score", "correct", "reward")))


def score(role: str, weight: float = 1.0, of: str | None = None) -> Signature:
    """A learned score at the row's end; the reward role's becomes `reward`."""
    prefix = f"{of}." if of else ""
    writes = ("score", "correct", "reward") if role == "reward" else (role,)
    return Signature(Kind.INFER, tuple(prefix + c for c in SEQUENCE), tuple(prefix + c for c in writes))


def log_probs(role: str) -> Signature:
    """Log-probabilities of the action tokens under the role's weights."""
    return Signature(Kind.INFER, SEQUENCE, (LOG_PROBS.get(role, f"{role}_log_probs"),))


def values(role: str) -> Signature:
    """One value per action token."""
    return Signature(Kind.INFER, SEQUENCE, (VALUES.get(role, f"{role}_values"),))


def update(
    role: str,
    loss: Mapping[str, Any] | None = None,
    aggregate: str = "token-mean",
    old: str | None = None,
    kl: Mapping[str, Any] | None = None,
    entropy_coef: float = 0.0,
    correction: Mapping[str, Any] | None = None,
    source: str | None = None,
    decay: float = 0.0,
) -> Signature:
    """One pass over the batch in `rows_per_update` steps, or with `source=` a copy of another role's weights."""
    if source is not None:
        return Signature(Kind.TRAIN)
    entry = loss_entry(loss)
    settings = {k: v for k, v in (loss or {}).items() if k != "name"}
    try:
        entry.check(settings)
        _ = registry.aggregations[aggregate]
        for registered, value in ((registry.divergences, kl), (registry.corrections, correction)):
            if value is not None:
                registered[value["name"]].check({k: v for k, v in value.items() if k not in ("name", "coef")})
    except (ValueError, KeyError) as error:
        raise UserError(f"{role}.update: {error.args[0]}") from None
    return update_signature(entry, old, kl, correction)


def loss_entry(loss: Mapping[str, Any] | None) -> Entry:
    """The registered loss that a stage's `loss` parameter names. Raises UserError for an unknown one."""
    name = (loss or {}).get("name")
    if name is None:
        raise UserError(f"update needs a loss, as in `loss: {{name: clip}}`. {suggest('', registry.losses)}")
    if ":" in name:
        function = import_function(name)
        for entry in registry.losses.entries.values():
            if entry.function is function:
                return entry
        raise UserError(f"{name}: put @losses.register() above the function")
    try:
        return registry.losses[name]
    except KeyError as error:
        raise UserError(str(error.args[0])) from None


def update_signature(
    entry: Entry, old: str | None, kl: Mapping[str, Any] | None, correction: Mapping[str, Any] | None
) -> Signature:
    """Columns that a train stage reads: the sequence, and what its loss, KL term and correction name."""
    named = set(entry.reads) - {"log_probs", "entropy", "offsets"}
    if kl is not None:
        named.add("ref_log_probs")
    if correction is not None:
        named |= {"old_log_probs", "rollout_log_probs"}
    if "old_log_probs" in named and old != "recompute":
        named.discard("old_log_probs")
        if old == "rollout":
            named.add("rollout_log_probs")
    one_of = (("advantages", "advantage"),) if "advantages" in named else ()
    reads = (*SEQUENCE, "length", "action_tokens", *sorted(named - {"advantages"}))
    return Signature(Kind.TRAIN, reads, (), (*entry.optional, "loss_mask"), one_of)


ROLE_TYPES: dict[str, Callable[..., Signature]] = {
    f.__name__: f for f in (generate, verify, score, log_probs, values, update)
}


def _checked(type: str, params: Mapping[str, Any]) -> dict[str, Any]:
    known = [name for name in ROLE_TYPES[type].__annotations__ if name not in ("role", "return")]
    for name in params:
        if name not in known:
            raise UserError(f"{type} has no parameter {name!r}. {suggest(name, known)}")
    return dict(params)


class StageFamily:
    """`advantage.gae(gamma=1.0)` makes the stage of type `advantage.gae`; any registered name is an attribute."""

    def __init__(self, family: str) -> None:
        self._family = family

    def __getattr__(self, name: str) -> Callable[..., Stage]:
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
