"""Registered functions by name, and the signatures of stages: the columns that each reads and writes, by type.

A function's keyword parameters are the type's parameters in YAML. A stage may also call a method of a user's class,
`methods.py:Surprise.surprise`, registered with the columns that it reads and writes.
"""

import inspect
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import braidrl.algorithms.library  # noqa: F401  (registers what comes with Braid)
from braidrl.algorithms import registry
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import Entry, Registry, is_number
from braidrl.data.token_columns import ROUTED_EXPERTS, TokenColumn, column_of, returned_columns, token_columns
from braidrl.deferred import Tensor
from braidrl.errors import UserError, shown, suggest, users_errors
from braidrl.flow.stage import Kind, Signature, Stage
from braidrl.importing import LOADED_FROM_FILE, import_function

SEQUENCE = ("tokens", "action_mask", "sequence_lengths")
GENERATED = (
    *SEQUENCE,
    *(column.name for column in returned_columns()),
    "length",
    "action_tokens",
    "finish_reason",
    "version",
)
# Columns of an episode with an environment; its prompt is the environment's first context.
TURNS = ("turn_lengths", "turn_rewards", "turn_states")
# Columns with one entry for each turn of an episode.
PLAYED = (
    "prompt",
    "prompt_length",
    *GENERATED,
    "score",
    "correct",
    "reward",
    "statistics_mask",
    "observation_tokens",
    *TURNS,
)
# Columns that all trajectories of a row share: a stage reads them without a namespace.
SHARED = ("source", "group", "sample", "metadata", "prompt", "prompt_length", "response", "response_mask", "ptx_tokens")
# Number of reflection phrases in a response.
COUNTED = ("reflections",)
# Columns to which each reward source adds its score: the next source reads the sum so far.
SUMMED = ("score", "reward")
LOG_PROBS = {"actor": "old_log_probs", "reference": "ref_log_probs"}
VALUES = {"critic": "values", "cost_critic": "cost_values"}
# For each role, a column in the signature of a loss -> the role's own column.
COLUMNS_OF_ROLE = {"cost_critic": {"values": "cost_values", "returns": "cost_returns"}}
# Parameters of an update that name a registered function and its settings.
CHOICES: dict[str, Registry] = {
    "loss": registry.losses,
    "aggregate": registry.aggregations,
    "kl": registry.divergences,
    "correction": registry.corrections,
}
# Log-probs that a policy's update reads if they exist, to report the divergence from them.
MONITORED = ("rollout_log_probs", "ref_log_probs")
FAMILIES: dict[str, Registry] = {
    "advantage": registry.advantages,
    "shape": registry.shapes,
    "select": registry.selections,
    "data": registry.responses,
}
"""Families of the functions of compute and select stages."""
OLD = ("recompute", "rollout", "self")
REPLAYS = ("none", "inference", "training")
"""The experts of a mixture in an update: chosen anew, those that the engine chose, or of the recomputed log-probs."""
ROLE_TYPES: dict[str, dict[str, type]] = {
    "generate": {
        "into": str,
        "greedy": bool,
        "temperature": float,
        "top_p": float,
        "top_k": int,
        "purpose": str,
        "environment": str,
        "policies": list,
        "columns": list,
    },
    "verify": {"correct_score": float, "wrong_score": float, "weight": float, "of": str},
    "score": {"weight": float, "of": str},
    "log_probs": {"replay": str, "of": str},
    "values": {"of": str},
    "update": {
        "of": str,
        "loss": object,
        "aggregate": object,
        "old": str,
        "kl": object,
        "entropy_coef": float,
        "correction": object,
        "source": str,
        "decay": float,
        "ptx_coef": float,
        "positive_coef": float,
        "observation_coef": float,
        "replay": str,
    },
}
"""The types of a role's stages (methods of `Role`) with their parameters' types; `object` is a choice among CHOICES."""
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1e4),
    "top_p": (1e-9, 1),
    "top_k": (0, 1 << 24),
    "ptx_coef": (0, 1e6),
    "positive_coef": (0, 1e6),
    "observation_coef": (0, 1e6),
}
"""Parameter -> the smallest and the largest valid value."""
NAMES_OF_TYPES = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", list: "a list"}
# Parameters of losses that the training pass itself computes: they are not columns.
COMPUTED_IN_TRAINING = ("log_probs", "entropy", "values", "scores", "offsets", "group_tokens")


def role_signature(type: str, role: str, params: Mapping[str, Any]) -> Signature:
    """Return the signature of a role's stage. Raises UserError for an unknown or invalid parameter.

    generate   a trajectory, with the `columns` per token that the engine returns beside those of every response; with
               an environment, the score and the reward come from it, and each of further `policies` writes a trajectory
               of the same episode into the namespace of its name
    verify     `correct`, and scores that are added to `score` and `reward`
    score      `<role>_score`, added to `score` and `reward` times its weight; if it is no reward, a column with the
               role's name
    log_probs  log-probabilities of the action tokens under the role's weights
    values     one value per action token
    """
    for name, value in params.items():
        if name not in ROLE_TYPES[type]:
            raise UserError(f"{role}.{type} has no parameter {name!r}. {suggest(name, ROLE_TYPES[type])}")
        kind = ROLE_TYPES[type][name]
        is_truth = isinstance(value, bool) and kind in (int, float)
        if is_truth or not isinstance(value, int | float if kind is float else kind):
            raise UserError(f"{role}.{type}: {name} must be {NAMES_OF_TYPES[kind]}, got {value!r}")
        least, greatest = RANGES.get(name, (-math.inf, math.inf))
        if kind in (int, float) and not least <= params[name] <= greatest:
            raise UserError(f"{role}.{type}: {name} must lie between {least} and {greatest}, got {value}")
    if type == "update":
        return update_signature(role, params)
    if type == "generate":
        into = params.get("into")
        if into is not None and not into.isidentifier():
            raise UserError(f"{role}.generate: into must be a plain name, as in `into: greedy`, got {into!r}")
        check_policies(role, params)
        extra = tuple(column.name for column in map(column_of, params.get("columns", ())))
        of_trajectory = (*(PLAYED if "environment" in params else GENERATED), *extra, *COUNTED)
        writes = tuple(name for space in namespaces_of(params) for name in in_namespace(space, of_trajectory))
        return Signature(kind=Kind.GENERATE, reads=("prompt", "prompt_length", "metadata"), writes=writes)
    of = params.get("of")
    sequence, summed = in_namespace(of, SEQUENCE), in_namespace(of, SUMMED)
    if type == "verify":
        reads = ("prompt", "metadata", *in_namespace(of, ("tokens", "action_mask")))
        writes = in_namespace(of, ("score", "correct", "reward"))
        return Signature(kind=Kind.COMPUTE, reads=reads, writes=writes, optional=summed)
    if type == "score" and (role == "reward" or "weight" in params):
        writes = (*in_namespace(of, (f"{role}_score",)), *summed)
        return Signature(kind=Kind.INFER, reads=sequence, writes=writes, optional=summed)
    routes = replayed_columns(role, type, params)
    records = params.get("replay") == "training"
    sequence = sequence if records else (*sequence, *in_namespace(of, routes))
    columns = {"score": role, "log_probs": log_probs_column(role), "values": VALUES.get(role, f"{role}_values")}
    written = (columns[type], *(routes if records else ()))
    return Signature(kind=Kind.INFER, reads=sequence, writes=in_namespace(of, written))


def update_signature(role: str, params: Mapping[str, Any]) -> Signature:
    """Return the signature of an update: one pass over the batch in `rows_per_update` steps, or a copy of weights."""
    if "source" in params:
        if "loss" in params:
            raise UserError(f"{role}.update takes a loss or a source, not both")
        if "of" in params:
            raise UserError(f"{role}.update copies the weights of {params['source']} and reads no rows; remove `of`")
        return Signature(kind=Kind.TRAIN)
    if "loss" not in params:
        raise UserError(f"{role}.update needs a loss, as in `loss: {{name: clip}}`. {suggest('', registry.losses)}")
    chosen = {"aggregate": "token-mean", **params}
    entries = {name: chosen_entry(role, name, chosen[name]) for name in CHOICES if name in chosen}
    defined, aggregation = entries["loss"].needs.aggregations, entries["aggregate"].name
    if defined and aggregation not in defined:
        raise UserError(
            f"{role}.update: {entries['loss'].name} is defined for aggregate {' or '.join(defined)}, not {aggregation}"
        )
    if "correction" in entries and entries["loss"].needs.weighs_rollout:
        raise UserError(f"{role}.update: the loss {entries['loss'].name} corrects itself; remove `correction`")
    old = params.get("old")
    if old is not None and old not in OLD:
        raise UserError(f"{role}.update: no `old` is called {old!r}. {suggest(old, OLD)}")
    likelihood = {
        "ptx_tokens": params.get("ptx_coef"),
        "correct": params.get("positive_coef"),
        "observation_tokens": params.get("observation_coef"),
    }
    reads, optional, computed = {column for column, weight in likelihood.items() if weight}, list[str](), set[str]()
    for entry in entries.values():
        computed |= {*entry.reads, *entry.optional}
        reads |= set(columns_in_training(role, entry, entry.reads).values())
        optional += columns_in_training(role, entry, entry.optional).values()
    if "old_log_probs" in reads:
        source = {"rollout": {"rollout_log_probs"}, "recompute": {log_probs_column(role)}}
        reads = reads - {"old_log_probs"} | source.get(old or "", set())
    one_of = (("advantages", "turn_advantages", "advantage"),) if "advantages" in reads else ()
    replayed = replayed_columns(role, "update", params)
    if params.get("replay") == "training" and old != "recompute":
        raise UserError(
            f"{role}.update: replay=training takes the experts of recomputed log-probs; write old=recompute"
        )
    columns = (*SEQUENCE, "length", "action_tokens", *sorted(reads - {"advantages"}), *replayed)
    monitored = [name for name in MONITORED if name not in columns and "log_probs" in computed]
    by_turn = ["turn_lengths"] if one_of else []
    optional = [*optional, "loss_mask", "finish_reason", *monitored, *by_turn]
    of = params.get("of")
    return Signature(
        kind=Kind.TRAIN,
        reads=read_in_namespace(of, columns),
        optional=read_in_namespace(of, optional),
        one_of=tuple(read_in_namespace(of, names) for names in one_of),
    )


def replayed_columns(role: str, type: str, params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the column of routes that a stage with `replay` reads or records.

    Raises UserError for an unknown value.
    """
    replay = params.get("replay", "none")
    if replay not in REPLAYS:
        raise UserError(f"{role}.{type}: no `replay` is called {replay!r}. {suggest(replay, REPLAYS)}")
    return () if replay == "none" else (ROUTED_EXPERTS,)


def log_probs_column(role: str) -> str:
    """Return the column of a role's log-probs, which an update of the role compares with."""
    return LOG_PROBS.get(role, f"{role}_log_probs")


def needs_old(role: str, params: Mapping[str, Any]) -> bool:
    """Return True if an update with these parameters reads `old_log_probs`."""
    chosen = [chosen_entry(role, name, params[name]) for name in ("loss", "correction") if name in params]
    return any("old_log_probs" in entry.reads for entry in chosen)


def columns_in_training(role: str, entry: Entry, parameters: Sequence[str]) -> dict[str, str]:
    """Map the parameters of a loss, KL estimator or correction to columns, without what the training pass computes."""
    renamed = COLUMNS_OF_ROLE.get(role, {})
    columns = {name: entry.column(name) for name in parameters if name not in COMPUTED_IN_TRAINING}
    return {name: renamed.get(column, column) for name, column in columns.items()}


def chosen_entry(role: str, parameter: str, choice: str | Mapping[str, Any]) -> Entry:
    """Return the registered function for a name, or for a mapping with a name.

    Raises UserError for an unknown name, an unknown setting, or a missing `coef`.
    """
    location = f"{role}.update: {parameter}"
    settings = {"name": choice} if isinstance(choice, str) else choice
    if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
        raise UserError(
            f"{location} has no name, as in `{parameter}: {{name: ...}}`. {suggest('', CHOICES[parameter])}"
        )
    settings = dict(settings)
    try:
        entry = entry_of(CHOICES[parameter], settings.pop("name"))
        if parameter == "kl" and not is_number(settings.pop("coef", None)):
            raise UserError("needs `coef`, the factor before the KL term")
        entry.check(settings)
    except (ValueError, UserError) as error:
        raise UserError(f"{location}: {error}") from None
    return entry


def columns_of(stage: Stage) -> tuple[str, ...]:
    """Return the per-token columns that a generate stage's requests name, beside the columns of every response."""
    return tuple(stage.params.get("columns", ()))


def columns_read_later(namespace: str | None, later: Iterable[Signature]) -> list[str]:
    """Return the columns per token that an engine must return because later stages read them in this namespace of a
    generate stage.
    """
    written = {name for stage in later for name in stage.writes}
    read = {name for stage in later for name in stage.reads} - written
    extra = [column for column in token_columns.values() if not column.is_always_returned]
    return [public_name(column, column.name) for column in extra if in_namespace(namespace, (column.name,))[0] in read]


def in_namespace(namespace: str | None, columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{namespace}.{name}" for name in columns) if namespace else tuple(columns)


def read_in_namespace(namespace: str | None, columns: Sequence[str]) -> tuple[str, ...]:
    """Add the namespace to the columns that a stage reads or writes, except shared columns and those that name one."""
    named = in_namespace(namespace, columns)
    return tuple(c if c in SHARED or "." in c else n for c, n in zip(columns, named, strict=True))


def namespaces_of(params: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Return the namespaces that a generate stage with these parameters writes: `into`, and each further policy."""
    return (params.get("into"), *params.get("policies", ()))


def check_policies(role: str, params: Mapping[str, Any]) -> None:
    """Raise UserError for further policies of a generate stage without an environment, or one that is no other role."""
    policies = params.get("policies", [])
    if policies and ("environment" not in params or "into" in params):
        raise UserError(f"{role}.generate: policies take turns in an environment; write `environment` without `into`")
    for name in policies:
        if not isinstance(name, str) or not name.isidentifier() or name == role or policies.count(name) > 1:
            raise UserError(f"{role}.generate: policies are names of other roles, each once, got {name!r}")


def class_and_method(type: str) -> tuple[Any, str]:
    """Return the class and the method's name of `module:Class.method`. Raises UserError for an unknown class."""
    class_name, _, method = type.rpartition(".")
    if ":" not in class_name:
        raise UserError(f"{type} names no method; write module:Class.method or path/to/file.py:Class.method")
    return import_function(class_name), method


def registration_of(owner: Any, method: str) -> Any:
    """Return the registration of a class's method. Raises UserError for a method without a protocol."""
    registration = getattr(getattr(owner, method, None), "registration", None)
    if registration is None:
        registered = [name for name in dir(owner) if hasattr(getattr(owner, name), "registration")]
        raise UserError(
            f"{owner.__name__} has no method {method!r} with @register(protocol=...) above it. "
            f"{suggest(method, registered)}"
        )
    return registration


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
    return Signature(kind=Kind.INFER, reads=registration.reads, writes=registration.writes)


def compute_entry(type: str, also: Iterable[str] = ()) -> Entry:
    """Return the function of a compute or select stage's type.

    Raises UserError for an unknown type; the hint names `also` other types.
    """
    if ":" in type:
        first, *registries = FAMILIES.values()
        return entry_of(first, type, *registries)
    family, _, name = type.partition(".")
    if family not in FAMILIES:
        types = [*also, *(f"{f}.{n}" for f, registered in FAMILIES.items() for n in registered)]
        raise UserError(f"no stage type is called {type!r}. {suggest(type, types)}")
    return entry_of(FAMILIES[family], name)


def called(entry: Entry, columns: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    """Call a registered function.

    Raises UserError, with the line, for an exception in a user's function, and for one that changes a column in place:
    metrics and later stages read the same tensor.
    """
    tensors = [column.values if isinstance(column, Ragged) else column for column in columns]
    counted = [t if isinstance(t, Tensor) and not t.is_inference() else None for t in tensors]
    before = [None if t is None else t._version for t in counted]
    with users_errors(entry.name, entry.function):
        result = entry.function(*columns, **settings)
    for parameter, tensor, version in zip((*entry.reads, *entry.optional), counted, before, strict=False):
        if tensor is not None and tensor._version != version:
            raise UserError(
                f"{entry.name} changes its argument {parameter!r} in place, which other stages read; make a new tensor"
            )
    return result


def form_of(value: Any) -> str:
    """Describe what a user's function returned: its type, and the shape of a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return f"a Ragged of {len(value)} rows" if isinstance(value, Ragged) else shown(value)


def entry_of(registered: Registry, name: str, *others: Registry) -> Entry:
    """Return the entry of a name, or of the function `module:function`.

    Raises UserError unless it is registered once, also in `others`.
    """
    if ":" not in name:
        try:
            return registered[name]
        except KeyError as error:
            raise UserError(str(error.args[0])) from None
    function = import_function(name)
    entries = [e for family in (registered, *others) for e in family.values() if e.function is function]
    if not entries:
        families = " or ".join(family.family for family in (registered, *others))
        raise UserError(f"{name} is no registered {families}; put the family's decorator above the function")
    if len(entries) > 1:
        raise UserError(
            f"{name} is registered as {' and '.join(e.name for e in entries)}; register a separate function for each"
        )
    return entries[0]


def public_name(entry: Entry | TokenColumn, name: str) -> str:
    """Return a built-in function's `name`, a user's as `module:function` or `file.py:function`, which another process
    can import.
    """
    if entry.function is None:
        return name
    module = sys.modules.get(entry.function.__module__)
    if module is None or module.__name__.startswith("braidrl."):
        return name
    attribute = entry.function.__name__
    if getattr(module, attribute, None) is not entry.function:
        return name
    by_file = module.__name__ == "__main__" or module.__name__.startswith(LOADED_FROM_FILE)
    return f"{module.__file__ if by_file else module.__name__}:{attribute}"
