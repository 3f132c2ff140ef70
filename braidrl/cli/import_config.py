"""`braid import-config FILE`: conversion of another framework's configuration, with a line for each of its keys.

verl's and AReaL's YAML, overrides    ─┐
OpenRLHF's, slime's, TRL's arguments  ─┼─keys──▶ NAME_keys.yaml: key of Braid, rule ──▶ braid.yaml, checked
TRL's YAML, prime-rl's TOML           ─┘                       └──▶ translated | to decide | without counterpart
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from braidrl.cli.import_python import PythonScript
from braidrl.cli.import_scripts import (
    COMMAND_LINE,
    UNKNOWN_TO_READERS,
    WHOLE,
    arguments,
    overrides,
    read_commands,
)
from braidrl.cli.importing.frameworks import FRAMEWORKS, Framework
from braidrl.cli.importing.imported import Decide, Imported
from braidrl.cli.importing.rules import RULES
from braidrl.config import parse_config
from braidrl.errors import UserError, shown
from braidrl.parsing import flat, read_text, read_yaml

NOTES = "notes"
"""The key of what a script's reader says about other keys."""
TRANSLATED, DECIDE, WITHOUT = "translated", "to decide", "without counterpart"


class KeyOutcome(NamedTuple):
    """The outcome of a key: translated, to decide, or without counterpart; and its target or the reason."""

    kind: str
    text: str


TOML = "prime-rl"
"""The framework whose files are TOML."""


def read_source(path: Path) -> tuple[Framework, dict[str, Any]]:
    """Return the framework of a configuration or script, and the keys that it sets. Raises UserError for others."""
    if not path.is_file():
        raise UserError(f"no configuration file {path}")
    if path.suffix == ".py":
        script = PythonScript(path)
        if command := script.command():
            return FRAMEWORKS["TRL"], {COMMAND_LINE: f"trl {command}", **script.source_keys()}
        raise UserError(f"{path} calls no trainer of TRL, such as GRPOTrainer")
    if path.suffix not in (".yaml", ".yml", ".toml"):
        return read_script(path)
    tree = read_toml(path) if path.suffix == ".toml" else read_yaml(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold keys and values, as in `algorithm: {{adv_estimator: grpo}}`")
    # `+key` is Hydra's syntax for adding a key.
    dotted = {re.sub(r"(^|\.)\++", r"\1", str(key)): value for key, value in flat(tree, WHOLE)}
    for framework in FRAMEWORKS.values():
        is_its_form = (framework.name == TOML) == (path.suffix == ".toml")
        if is_its_form and any(key.startswith(mark) for key in dotted for mark in framework.marks):
            if framework.name == TOML:
                return framework, {COMMAND_LINE: path.stem, **dotted}
            # TRL's arguments are not nested: a mapping is a value.
            return framework, dotted if framework.has_overrides else {str(key): value for key, value in tree.items()}
    raise UserError(
        f"{path} names no model and no data by keys of verl, AReaL or TRL, as in "
        "`actor_rollout_ref: {model: {path: ...}}`, and is no TOML of prime-rl; OpenRLHF and slime have scripts, whose "
        "names end in .sh"
    )


def read_toml(path: Path) -> dict[str, Any]:
    """Return the keys of a TOML file, with the tables of an array by their numbers. Raises UserError for other text."""

    def numbered(value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
            value = {str(number): part for number, part in enumerate(value)}
        # A table without keys turns its section on.
        return ({key: numbered(part) for key, part in value.items()} or True) if isinstance(value, dict) else value

    try:
        tree = tomllib.loads(read_text(path))
        return {key: numbered(part) for key, part in tree.items()}
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is no TOML: {error}") from None


def read_script(path: Path) -> tuple[Framework, dict[str, Any]]:
    """Return the framework and the keys of the last command of a script that starts one; NOTES describes the keys that
    depend on how the script is run.

    Raises UserError if there is none.
    """
    trainings = [training for words in read_commands(path) if (training := training_of(words, path))]
    if not trainings:
        names = (
            "verl.trainer.main_ppo, openrlhf.cli.train_ppo_ray, slime's train.py, trl grpo, prime-rl's `rl @ FILE`, or "
            "AReaL's `--config FILE`"
        )
        raise UserError(f"{path} starts no training that is known, such as {names}")
    framework, keys = trainings[-1]
    otherwise = [training_of(words, path) for words in read_commands(path, conditional=False)]
    _, before = next((training for training in reversed(otherwise) if training), (framework, keys))
    notes = {
        key: f"{shown(value)} is set under a condition or in a loop of the script, the last time that it is; check it"
        for key, value in keys.items()
        if key != COMMAND_LINE and value != before.get(key) and not UNKNOWN_TO_READERS.search(str(value))
    }
    if len(trainings) > 1:
        notes["command"] = f"the script starts {len(trainings)} trainings; the last one was read"
    return framework, {**keys, NOTES: notes}


def training_of(words: list[str], path: Path) -> tuple[Framework, dict[str, Any]] | None:
    """Return the framework that a command of a script starts, and the keys that it sets; None for other commands."""
    if words[0] in ("echo", "printf"):
        return None
    file = named_file(words, path)
    named = read_source(file) if file is not None and file.is_file() else None
    for framework in FRAMEWORKS.values():
        at = next((n for n, word in enumerate(words) if framework.command.search(word)), None)
        is_areal = framework.name == "AReaL" and (named is not None or (at is not None and "launcher" in words[at]))
        if (
            at is None
            or not framework.starts(words, at)
            or (named is not None and named[0] is not framework)
            or (framework.name == "AReaL" and not is_areal)
        ):
            continue
        if framework.name == TOML:
            return framework, {COMMAND_LINE: words[at], **dict(with_files(words[at + 1 :], path))}
        rest = [word for word in words[at + 1 :] if framework.name != "AReaL" or "=" in word.lstrip("-")]
        pairs = list((overrides if framework.has_overrides else arguments)(rest))
        begin = words.index("launch") + 1 if "launch" in words[:at] else 0
        launched = dict(arguments([word for word in words[begin:at] if word.startswith("-") or begin]))
        if "torchrun" in words[:at]:
            launched = {k: v for k, v in arguments(words[words.index("torchrun") + 1 : at - 1]) if k != words[at - 1]}
            pairs = [*(launched.items() if framework.name == "verl-SFT" else ()), *pairs]
        keys = {COMMAND_LINE: " ".join(words[max(0, at - 1) : at + 1]), **dict(pairs)}
        if framework.name == "TRL":
            keys = {**launched, **keys} if begin else keys
            # `--no_x` sets x to false.
            for key in [key for key in keys if key.startswith("no_") and key[3:] in framework.table]:
                keys[key[3:]] = not keys.pop(key)
        if file is not None and framework.name in ("TRL", "AReaL"):
            keys.pop("--config", keys.pop("config", None))  # of `--config=FILE` in overrides, and of arguments
            keys = {**(named or read_source(file))[1], **keys}
        return framework, keys
    return None


def named_file(words: Sequence[str], path: Path) -> Path | None:
    """Return the configuration that a command names by `--config`: beside its script, or below this folder."""
    joined = (word.partition("=")[2] for word in words if word.startswith("--config="))
    apart = (value for word, value in pairwise(words) if word == "--config")
    name = next((value for value in (*apart, *joined) if value.endswith((".yaml", ".yml"))), None)
    if name is None:
        return None
    files = [path.parent / name, Path(name), path.parent / Path(name).name]
    return next((file for file in files if file.is_file()), files[0])


def with_files(words: Sequence[str], path: Path) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of prime-rl's arguments: `@ FILE`, `--section @ FILE` and `--section.key value`."""
    rest, number = list[str](), 0
    spaced = [part for word in words for part in (("@", word[1:]) if word[:1] == "@" and len(word) > 1 else (word,))]
    while number < len(spaced):
        if spaced[number] == "@" and number + 1 < len(spaced):
            section = rest.pop().lstrip("-") + "." if rest and rest[-1].startswith("--") else ""
            file = next((f for f in (path.parent / spaced[number + 1], Path(spaced[number + 1])) if f.is_file()), None)
            if file is None:
                raise UserError(f"no configuration file {spaced[number + 1]}, which {path} names")
            yield from ((f"{section}{key}", value) for key, value in flat(read_toml(file)))
            number += 1
        else:
            rest.append(spaced[number])
        number += 1
    yield from arguments(rest)


def import_config(path: Path) -> tuple[dict[str, Any], dict[str, KeyOutcome]]:
    """Return the nested keys of a Braid configuration, and the outcome of each key of the other framework's.

    Raises UserError for a file of an unknown framework, or one without a model.
    """
    framework, written = read_source(path)
    notes = written.pop(NOTES, {})
    names = {key: framework.names.get(key, key) for key in written}
    source_keys = {names[key]: number_of(value) for key, value in written.items()}
    # The recipe follows from what the source states, and some defaults from the recipe.
    flow = framework.flow(source_keys)
    defaults = {key: default_of(row["default"], flow) for key, row in framework.table.items() if "default" in row}
    defaults = {key: value for key, value in defaults.items() if value is not None}
    source_keys = {key: referred(value, defaults | source_keys) for key, value in source_keys.items()}
    usable = {
        key: value
        for key, value in source_keys.items()
        if value not in (None, "???", {}) and not UNKNOWN_TO_READERS.search(str(value))
    }
    # Keys follow the table's order, so that a rule finds the results of rows above it.
    order = {key: number for number, key in enumerate(framework.table)}
    keys = sorted(defaults | usable, key=lambda key: order.get(key, len(order)))
    imported = Imported(defaults | usable, path.parent)
    imported.flow = imported.converted["flow"] = flow
    outcomes = {key: translate(framework, imported, key) for key in keys}
    framework.finish(imported)
    for key, outcome in outcomes.items():
        if reason := next((imported.dropped[to] for to in outcome.text.split(", ") if to in imported.dropped), None):
            outcomes[key] = KeyOutcome(DECIDE, reason)
        elif outcome.kind == TRANSLATED:
            targets = [
                name if name in imported.converted else imported.moved.get(name, name)
                for name in outcome.text.split(", ")
            ]
            outcomes[key] = KeyOutcome(TRANSLATED, ", ".join(dict.fromkeys(targets)))
    for key in source_keys.keys() - usable.keys():
        row = framework.row(key) or {}
        is_needless = not row.keys() & {"to", "rule", "decide"} and "note" in row
        outcomes[key] = KeyOutcome(WITHOUT, row["note"]) if is_needless else without_value(key, source_keys[key])
    outcomes = {key: outcomes[names[key]] for key in written if key != COMMAND_LINE}
    theirs = {name: key for key, name in names.items()}
    outcomes |= {key: KeyOutcome(TRANSLATED, text) for key, text in imported.chosen.items()}
    for key, advice in (imported.advice | notes).items():
        outcomes[theirs.get(key, key)] = KeyOutcome(DECIDE, advice)
    # A path that only the script knows is to be written; the outcome of its key says so.
    is_named = any((framework.row(key) or {}).get("to") == "model" for key in source_keys.keys() - usable.keys())
    if "model" not in imported.converted and not is_named:
        raise UserError(f"{path} names no model of {framework.name}; is it a whole configuration?")
    is_advised = any(outcome.text.startswith("trainer.steps") for outcome in outcomes.values())
    if "trainer.steps" not in imported.converted and not is_advised:
        outcomes["trainer.steps"] = KeyOutcome(DECIDE, f"{framework.name} counts epochs; write trainer.steps")
    return nested(imported.converted), outcomes


def default_of(value: Any, flow: str) -> Any:
    """Return a key's default, which a table may give by recipe, with one for `other` recipes."""
    return value.get(flow, value["other"]) if isinstance(value, dict) else value


def number_of(value: Any) -> Any:
    """Return a number that YAML reads as text, as in `1e-6`; other values unchanged."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else value


def referred(value: Any, keys: Mapping[str, Any]) -> Any:
    """Return the value of a Hydra reference, such as `${data.max_prompt_length}`; other values unchanged."""
    match = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    return keys.get(match[1], value) if match else value


def without_value(key: str, value: Any) -> KeyOutcome:
    """Return the outcome of a key without a readable value."""
    if key.startswith("~"):
        return KeyOutcome(WITHOUT, "removed from the defaults, which Braid does not read")
    if UNKNOWN_TO_READERS.match(key):
        return KeyOutcome(DECIDE, "known to the script alone; write the arguments that it stands for")
    if value in (None, "???", {}):
        return KeyOutcome(WITHOUT, "it has no value")
    return KeyOutcome(DECIDE, f"{shown(value)} is known to the script or to Hydra alone; write the value")


def translate(framework: Framework, imported: Imported, key: str) -> KeyOutcome:
    """Translate one key into Braid's configuration; return the outcome."""
    row, value = framework.row(key), imported.source_keys[key]
    if row is None:
        return KeyOutcome(DECIDE, f"{framework.name} has no such key; is it of your own, or of another version?")
    note, to = row.get("note", "no counterpart"), row.get("to", "")
    if imported.flow not in row.get("of", imported.flow).split():
        return KeyOutcome(WITHOUT, f"{imported.flow} has no such setting ({row['of']} has)")
    if advice := row.get("decide"):
        return KeyOutcome(DECIDE, advice) if value not in (False, 0) else KeyOutcome(WITHOUT, "it is off")
    if "to" not in row and "rule" not in row:
        return KeyOutcome(WITHOUT, note if value not in (False, 0) else f"it is off; {note}")
    before, together = dict(imported.converted), len(imported.together)
    values = {str(theirs).lower(): ours for theirs, ours in row.get("values", {}).items()}
    if values and "rule" not in row:
        is_known = str(value).lower() in values
        translated = values.get(str(value).lower(), Decide(row.get("else", f"{to} has no value like {shown(value)}")))
        if is_known and translated is None:
            return KeyOutcome(TRANSLATED, f"{to}, as by default")
    else:
        try:
            imported.key = key
            translated = RULES[row.get("rule", "")](imported, value, to)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError):
            translated = Decide(f"{shown(value)} is no value that is known for {to or key}")
    if isinstance(translated, Decide):
        return KeyOutcome(DECIDE, translated)
    if translated is not None:
        imported.converted[to] = translated
        return KeyOutcome(TRANSLATED, to)
    if len(imported.together) > together:
        return KeyOutcome(TRANSLATED, to)
    changed = [name for name, setting in imported.converted.items() if name not in before or before[name] != setting]
    if changed:
        return KeyOutcome(TRANSLATED, ", ".join(changed))
    related = to and (to in imported.converted or any(name.startswith(f"{to}.") for name in imported.converted))
    if related:
        return KeyOutcome(TRANSLATED, to)
    return KeyOutcome(WITHOUT, "no effect with the other keys" + (f"; {row['note']}" if "note" in row else ""))


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        section = tree
        *sections, last = key.split(".")
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return tree


def write_imported(path: Path, target: Path) -> Iterator[str]:
    """Convert another framework's configuration to a Braid file, and yield the lines to print.

    Raises UserError if the target exists.
    """
    if target.exists():
        raise UserError(f"{target} exists; nothing was overwritten")
    tree, outcomes = import_config(path)
    target.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
    for key, outcome in outcomes.items():
        arrow = "→ " if outcome.kind == TRANSLATED else f"{outcome.kind}: "
        yield f"{key}  {arrow}{outcome.text}"
    yield f"{target}: {len(list(flat(tree)))} keys; check it with `braid train {target} --dry-run`"
    counts = Counter(outcome.kind for outcome in outcomes.values())
    yield f"{len(outcomes)} keys: {', '.join(f'{counts[kind]} {kind}' for kind in (TRANSLATED, DECIDE, WITHOUT))}"
    from braidrl.runtimes.prepare.run_flow import (
        build_flow,
    )  # imported here: it imports torch, and the lines should appear before that

    try:
        build_flow(parse_config(tree))
    except UserError as error:
        yield f"to be mended in {target}: {error}"
