"""The catalogue of everything that a flow or a configuration can name, with settings and sources: `braid list losses`.

registries of algorithms ──name, docstring, settings, columns──╮
registries of plug-ins ────name, docstring, settings───────────┴─▶ Listed
"""

import inspect
import re
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

import braidrl.algorithms.library  # noqa: F401  registers them
from braidrl.algorithms import registry
from braidrl.errors import UserError, suggest
from braidrl.importing import PluginRegistry

ALGORITHMS = {
    "losses": registry.losses,
    "advantages": registry.advantages,
    "shapes": registry.shapes,
    "selections": registry.selections,
    "aggregations": registry.aggregations,
    "corrections": registry.corrections,
    "kl-estimators": registry.divergences,
}
PLUGINS = {
    "recipes": "braidrl.flow.recipes:RECIPES",
    "curricula": "braidrl.data.curricula:CURRICULA",
    "conversions": "braidrl.data.conversions:CONVERSIONS",
    "rewards": "braidrl.rewards.verifiers:VERIFIERS",
    "engines": "braidrl.engines.engine:ENGINES",
    "backends": "braidrl.training.names:BACKENDS",
    "optimizers": "braidrl.training.names:OPTIMIZERS",
    "trackers": "braidrl.observe.trackers:TRACKERS",
    "samplers": "braidrl.queue.samplers:SAMPLERS",
    "transports": "braidrl.weights.names:TRANSPORTS",
    "protocols": "braidrl.runtimes.hybrid.protocols:PROTOCOLS",
}
KINDS = (*ALGORITHMS, "environments", *PLUGINS)
SCHEMES = {
    "gem:NAME": "An environment of the package gem-llm, such as gem:game:GuessTheNumber-v0-easy.",
    "mcp:SERVER": (
        "Tools of an MCP server, a command such as mcp:python server.py or an address; a verifier scores the answer."
    ),
    "openenv:ADDRESS": "An environment that a server of OpenEnv has, such as openenv:http://127.0.0.1:8000.",
    "verifiers:NAME": (
        "A taskset of the package verifiers, installed or of a file; its harness talks to an endpoint as agents do."
    ),
    "agent:MODULE:FUNCTION": "A whole agent with its own loop; its endpoint has OpenAI's and Anthropic's APIs.",
    "MODULE:CLASS": "Your own: a class with reset and step, or a function of all texts so far.",
}
SECTIONS = re.compile(r"\n\s*(?:Args|Returns|Raises):.*", re.DOTALL)


@dataclass(frozen=True)
class Listed:
    """One entry of the catalogue."""

    name: str
    about: str
    """Description and source: the docstring without its lists of arguments."""
    settings: dict[str, str] = field(default_factory=dict)
    """Default of each setting as Python text; `required` if there is none."""
    reads: tuple[str, ...] = ()
    """Columns that it reads; brackets mark optional ones."""


def names(kind: str) -> list[str]:
    """Return the names of a kind's built-in entries, whose modules are not imported. Raises UserError for an unknown
    kind.
    """
    if kind in ALGORITHMS:
        entries = [ALGORITHMS[kind][name] for name in ALGORITHMS[kind]]
        return [entry.name for entry in entries if entry.function.__module__.startswith("braidrl.")]
    return list(SCHEMES) if kind == "environments" else list(plugins_of(kind))


def plugins_of(kind: str) -> PluginRegistry:
    """Return the registry of a kind of plug-ins. Raises UserError for an unknown kind."""
    if kind not in PLUGINS:
        raise UserError(f"there is no list of {kind!r}. {suggest(kind, KINDS)}")
    registered: PluginRegistry = resolve_name(PLUGINS[kind])
    return registered


def catalogue(kind: str) -> list[Listed]:
    """Return the built-in entries of a kind. Raises UserError for an unknown kind."""
    listed: list[Listed] = []
    if kind in ALGORITHMS:
        for entry in (ALGORITHMS[kind][name] for name in names(kind)):
            settings = {name: "required" if name in entry.required else repr(v) for name, v in entry.settings.items()}
            settings |= {name: repr(value) for name, value in entry.state.items()}
            reads = [*map(entry.column, entry.reads), *(f"[{entry.column(name)}]" for name in entry.optional)]
            columns = dict.fromkeys(
                name for name in reads if name not in ("offsets", "[statistics_mask]", "[loss_mask]")
            )
            listed.append(Listed(entry.name, summary(entry.function), settings, tuple(columns)))
        return listed
    if kind == "environments":
        return [Listed(name, about) for name, about in SCHEMES.items()]
    plugins = plugins_of(kind)
    for name in plugins:
        try:
            plugin = plugins.find(name)
        except UserError as error:  # it needs a package that is not installed
            listed.append(Listed(name, str(error)))
            continue
        # A protocol is a pair of functions; the first one has the docstring.
        about, settings = summary(getattr(plugin, "distribute", plugin)), {}
        if plugins.kind in ("verifier", "curriculum"):
            keywords = [p for p in inspect.signature(plugin).parameters.values() if p.kind is p.KEYWORD_ONLY]
            settings = {p.name: "required" if p.default is p.empty else repr(p.default) for p in keywords}
        listed.append(Listed(name, about, settings))
    return listed


def summary(thing: Any) -> str:
    """Return a docstring in one line, without its lists of arguments."""
    return " ".join(SECTIONS.sub("", inspect.getdoc(thing) or "").split())
