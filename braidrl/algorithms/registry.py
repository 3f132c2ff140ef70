"""Registries of algorithms by name; a recipe, a YAML flow or a user's own file selects from them.

A registered function is a plain function. Its positional parameters are the columns that it reads, its keyword-only
parameters are its settings. `writes` names the columns that it returns.

    @advantages.register(writes=["advantage"], scope="group")
    def group_centered(reward: Tensor, group: Tensor) -> Tensor: ...

A positional parameter with the default None is an optional column: it is read if an earlier stage writes it.

The rows of a batch are spread over processes. A function of scope `batch` is called with some rows at a time, and is
given their sums:

    def count_and_sum(reward: Tensor) -> dict[str, Tensor]:
        return {"sum": reward.sum(), "rows": torch.tensor(len(reward))}

    @advantages.register(writes=["advantage"], scope="batch", sums=count_and_sum)
    def batch_centered(reward: Tensor, *, totals: dict[str, Tensor]) -> Tensor:
        return reward - totals["sum"] / totals["rows"]
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

ScopeName = Literal["row", "group", "batch"]
DENOMINATORS = ("tokens", "rows", "groups")
"""Denominators for sums of losses: action tokens, rows or groups of the optimizer step, after masking."""
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Needs:
    """Requirements of a function. A flow that does not meet them is refused before any model loads.

    limits          setting -> the smallest and the largest valid value
    choices         setting -> the valid names
    group_size      minimum of samples per prompt, or a function of the settings that returns it
    whole_groups    True for a loss that compares the rows of a group: they must share a micro-batch
    aggregations    the aggregations that a loss is defined for; empty means all
    weighs_rollout  True for a loss that contains the ratio to the rollout policy: no correction may be added
    """

    limits: dict[str, tuple[float, float]] = field(default_factory=dict)
    choices: dict[str, Iterable[str]] = field(default_factory=dict)
    group_size: int | Callable[[dict[str, Any]], int] = 1
    whole_groups: bool = False
    aggregations: tuple[str, ...] = ()
    weighs_rollout: bool = False


@dataclass(frozen=True)
class Entry:
    """A registered function with its columns and settings; see `Registry.register`."""

    name: str
    function: Callable[..., Any]
    reads: tuple[str, ...]
    optional: tuple[str, ...]
    settings: dict[str, Any]
    required: tuple[str, ...]
    writes: tuple[str, ...] = ()
    scope: ScopeName = "row"
    sums: Callable[..., Any] | None = None
    columns: dict[str, str] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)
    update_state: Callable[..., dict[str, float]] | None = None
    needs: Needs = field(default_factory=Needs)
    denominator: str = "tokens"

    def column(self, parameter: str) -> str:
        """Return the column that a positional parameter stands for: its own name unless `columns` renames it."""
        return self.columns.get(parameter, parameter)

    def check(self, values: dict[str, Any]) -> None:
        """Raise ValueError for an unknown, missing or invalid setting.

        A name of the state is also a setting: it sets the initial value.
        """
        settings = {**self.settings, **self.state}
        for name, value in values.items():
            if name not in settings:
                raise ValueError(f"{self.name} has no setting {name!r}. {suggest(name, settings)}")
            if (is_number(settings[name]) or name in self.needs.limits) and not (value is None or is_number(value)):
                raise ValueError(f"{self.name}: {name} must be a number, got {value!r}")
        for name in self.required:
            if values.get(name) is None:
                raise ValueError(f"{self.name} needs the setting {name!r}")
        for name, (least, greatest) in self.needs.limits.items():
            value = values.get(name)
            if value is not None and not least <= value <= greatest:
                raise ValueError(f"{self.name}: {name} must lie between {least} and {greatest}, got {value}")
        for name, names in self.needs.choices.items():
            if name in values and values[name] not in list(names):
                raise ValueError(f"{self.name}: {name} cannot be {values[name]!r}. {suggest(str(values[name]), names)}")


class Registry(dict[str, Entry]):
    """Functions of one family (`advantage`, `loss`, ...) by name."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family

    def register(
        self,
        name: str | None = None,
        *,
        writes: Sequence[str] = (),
        scope: ScopeName = "row",
        sums: Callable[..., Any] | None = None,
        columns: dict[str, str] | None = None,
        state: dict[str, float] | None = None,
        update_state: Callable[..., dict[str, float]] | None = None,
        needs: Needs | None = None,
        denominator: str = "tokens",
    ) -> Callable[[F], F]:
        """Return a decorator that registers a function.

        Args:
            name: By default the function's own.
            writes: Columns that it returns.
            scope: The rows that it must see at once.
            sums: For scope `batch`: `sums(columns, **settings)` returns a dict of numbers or tensors, which are added
                up over all rows; the function receives the totals as its keyword `totals`.
            columns: Columns of parameters whose names differ from the columns': `{"baseline": "greedy.reward"}`.
            state: Initial values of a small state that its stage owns, such as a KL coefficient; the function receives
                it as its keyword `state`.
            update_state: `update_state(state, totals, **settings)` returns the next state, once per iteration.
            needs: Requirements of the function.
            denominator: For an aggregation: the count that divides its sums.

        Raises:
            ValueError: Another function has the name, or `sums`, `state` and `update_state` do not belong together.
        """
        if bool(state) != bool(update_state) or (state and sums is None):
            raise ValueError("a state needs its initial values, the function that updates it and the sums for that")
        if scope == "batch" and sums is None:
            raise ValueError(
                f"a {self.family} of scope `batch` sees some rows of the batch at a time; give `sums`, a function of "
                "the same columns that "
                "returns a dict of what is added up over all rows, and take the result as the keyword `totals`"
            )
        if denominator not in DENOMINATORS:
            raise ValueError(f"a denominator is one of {', '.join(DENOMINATORS)}, not {denominator!r}")

        def add(function: F) -> F:
            title = name or function.__name__
            entry = Entry(
                title,
                function,
                *parameters_of(title, function),
                tuple(writes),
                scope,
                sums,
                columns or {},
                state or {},
                update_state,
                needs or Needs(),
                denominator,
            )
            if both := set(entry.state) & set(entry.settings):
                raise ValueError(f"{entry.name}: {sorted(both)} are in the state and among the settings")
            registered = self.get(entry.name)
            if registered and registered.function.__module__ != function.__module__:
                raise ValueError(
                    f"{self.family} {entry.name!r} is registered already, by {registered.function.__module__}"
                )
            self[entry.name] = entry
            return function

        return add

    def __missing__(self, name: str) -> Entry:
        raise KeyError(f"no {self.family} is called {name!r}. {suggest(name, self)}")

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.keys()))


class FunctionParameters(NamedTuple):
    """The columns and settings of a registered function, read from its signature."""

    reads: tuple[str, ...]
    """Columns that it needs."""
    optional: tuple[str, ...]
    """Columns that it also takes."""
    settings: dict[str, Any]
    """Values of its settings by default, None for a required one."""
    required: tuple[str, ...]


def parameters_of(title: str, function: Callable[..., Any]) -> FunctionParameters:
    """Sort the parameters of a function: columns are plain, settings are keyword-only.

    Raises ValueError for a parameter of another kind.
    """
    reads, optional, settings, required = list[str](), list[str](), dict[str, Any](), list[str]()
    for parameter in inspect.signature(function).parameters.values():
        has_default = parameter.default is not inspect.Parameter.empty
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            (optional if has_default else reads).append(parameter.name)
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            raise ValueError(f"{title}: columns are plain parameters and settings keyword-only, not {parameter}")
        elif parameter.name not in ("totals", "state"):
            settings[parameter.name] = parameter.default if has_default else None
            required += [] if has_default else [parameter.name]
    return FunctionParameters(tuple(reads), tuple(optional), settings, tuple(required))


def is_number(value: object) -> bool:
    """Return True for a number; a truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return a hint for an unknown name: the one of `choices` that it begins, or the most similar, else all of them."""
    names = sorted(choices)
    if begun := [choice for choice in names if len(name) > 2 and choice.startswith(name)]:
        return f"Did you mean {begun[0]!r}?"
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    # Swapped letters are likelier than another one.
    close.sort(key=lambda similar: sorted(similar) != sorted(name))
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(names) or 'none'}."


responses = Registry("data")
advantages = Registry("advantage")
shapes = Registry("shape")
selections = Registry("select")
losses = Registry("loss")
aggregations = Registry("aggregation")
corrections = Registry("correction")
divergences = Registry("KL estimator")
