"""Reading of other frameworks' configurations: YAML files, and shell scripts that end in a command with arguments.

script ──variables, arrays, continued lines──▶ words of the command ──overrides or --arguments──▶ keys and values

A script is read, never run. What only the shell knows stays in a value as `$NAME`.
"""

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from braidrl.errors import UserError
from braidrl.parsing import flat, parse_yaml, read_text

ASSIGNED = re.compile(r"^(\w+)(\+?)=", re.DOTALL)
ARRAY = re.compile(r"^[ \t]*(?:export |declare -a |local )?(\w+)(\+?)=\(([^()]*(?:\([^()]*\)[^()]*)*)\)", re.MULTILINE)
ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
COMMAND = re.compile(r"\$\([^()]*\)|`[^`]*`")
WHOLE_ARRAY = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+|[@*#])")
PREFIXES = ("export", "declare", "local", "readonly")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}
MOST_EXPANDED = 1 << 20
"""Maximum number of characters of an expanded line."""
COMMAND_LINE = "command line"
"""The key of the words that start a program, which say which one it is."""
UNKNOWN_TO_READERS = re.compile(r"\$[\w{(]")


def arithmetic(text: str) -> int | None:
    """Return the value of a sum or product of whole numbers; None for anything else."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            result = OPERATORS[type(node.op)](value(node.left), value(node.right))
            return int(result)
        raise ValueError

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


class Shell:
    """The variables and arrays of a script, as far as it sets them itself."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {"HOME": "~"}
        self.arrays: dict[str, list[str]] = {}

    def expanded(self, text: str) -> str:
        """Return a line with its variables, arrays and sums. Unknown ones stay as they are."""

        def variable(match: re.Match[str]) -> str:
            name = match[1] or match[3]
            if name in ("@", "*", "#") or (name.isdigit() and match[2] is None):
                return ""
            if name in self.variables:
                return self.variables[name]
            if name in self.arrays:
                return shlex.join(self.arrays[name][:1])
            return match[0] if match[2] is None else self.expanded(match[2])

        text = WHOLE_ARRAY.sub(lambda m: shlex.join(self.arrays[m[1]]) if m[1] in self.arrays else f"${m[1]}[@]", text)
        text = VARIABLE.sub(variable, text)
        if len(text) > MOST_EXPANDED:
            raise UserError(f"a line of the script has more than {MOST_EXPANDED} characters with its variables")
        # In a sum a variable needs no `$`.
        summed = partial(re.sub, r"[A-Za-z_]\w*", lambda m: self.variables.get(m[0], m[0]))
        text = ARITHMETIC.sub(lambda m: m[0] if (n := arithmetic(summed(m[1]))) is None else str(n), text)
        return COMMAND.sub("$SHELL_COMMAND", text)

    def words(self, text: str) -> list[str]:
        """Return the words of a line. Raises UserError for a quote without an end."""
        try:
            return shlex.split(self.expanded(text), comments=True)
        except ValueError as error:
            raise UserError(f"a command of the script cannot be read: {error}") from None

    def assign(self, words: Sequence[str]) -> bool:
        """Set variables if the words only assign some; return whether they do."""
        words = words[1:] if words and words[0] in PREFIXES else words
        if not words or not all(ASSIGNED.match(word) for word in words):
            return False
        for word in words:
            name, adds, value = word.partition("=")[0].rstrip("+"), "+=" in word[: word.index("=") + 1], word
            value = word.partition("=")[2]
            self.variables[name] = self.variables.get(name, "") + value if adds else value
        return True


def script_lines(text: str) -> Iterator[str]:
    """Yield the logical lines of a script: continued lines are joined, and a quoted text may span lines."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    pending = ""
    for line in re.sub(r"[ \t]*\\[ \t]*\n", " ", kept).split("\n"):
        pending = f"{pending}\n{line}" if pending else line
        is_closed = False
        with suppress(ValueError):
            shlex.split(pending, comments=True)
            is_closed = True
        if is_closed:
            yield pending
            pending = ""
    if pending:
        yield pending


def read_commands(path: Path) -> list[list[str]]:
    """Return the words of each command of a script, with its variables expanded."""
    shell, commands = Shell(), list[list[str]]()
    text = read_text(path)
    rest, begin = "", 0
    # Arrays may span lines and hold comments. They are replaced by a line that assigns them, in their order.
    for number, match in enumerate(ARRAY.finditer(text)):
        rest += f"{text[begin : match.start()]}\n__array__{number} "
        begin = match.end()
    arrays = {f"__array__{number}": match for number, match in enumerate(ARRAY.finditer(text))}
    for line in script_lines(rest + text[begin:]):
        name = line.split(maxsplit=1)[0] if line.strip() else ""
        if name in arrays:
            match = arrays[name]
            body = "\n".join(part for part in match[3].splitlines() if not part.lstrip().startswith("#"))
            words = shell.words(body.replace("\\\n", " ").replace("\n", " "))
            shell.arrays[match[1]] = (shell.arrays.get(match[1], []) if match[2] else []) + words
            continue
        # A line that cannot be read may still not be the one that counts.
        try:
            words = shell.words(line)
        except UserError:
            if "python" in line or "trl " in line:
                raise
            continue
        if words and not shell.assign(words):
            commands.append(words)
    return commands


TRAINER = re.compile(r"(?:^|\.)(?:GRPO|RLOO|DPO|SFT|Reward)(Trainer|Config)$")
"""TRL's classes, by whose calls its scripts in Python are read."""
LORA = {"r": "lora_r"}
"""Arguments of peft's LoraConfig whose names do not begin with `lora_` in TRL's commands."""


class PythonScript:
    """A script in Python that calls TRL's trainer: the keywords of its calls, as far as they are written there."""

    def __init__(self, path: Path) -> None:
        """Read the script, without executing it. Raises UserError if it is no Python."""
        try:
            self.tree = ast.parse(read_text(path))
        except (SyntaxError, ValueError, RecursionError) as error:
            raise UserError(f"{path} is no Python: {error}") from None
        self.path = path
        assigned = [node for node in ast.walk(self.tree) if isinstance(node, ast.Assign) and len(node.targets) == 1]
        self.variables = {node.targets[0].id: node.value for node in assigned if isinstance(node.targets[0], ast.Name)}
        self.functions = {node.name for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}

    def command(self) -> str:
        """Return the name of the trainer that is called, as in `grpo`; an empty text for none."""
        called = [ast.unparse(node.func) for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        names = [name.rpartition(".")[2] for name in called if TRAINER.search(name)]
        return next((re.sub(r"Trainer|Config", "", name).lower() for name in names), "")

    def given(self) -> dict[str, Any]:
        """Return keys and values, by the names that TRL's commands have."""
        keys = dict[str, Any]()
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if TRAINER.search(name):
                pairs = [(word.arg, word.value) for word in node.keywords if word.arg and word.arg != "args"]
                for key, value in pairs:
                    keys |= self.data(key, value) or {key: self.value(value)}
            elif name.rpartition(".")[2] == "LoraConfig":
                keys["use_peft"] = True
                for word in node.keywords:
                    key = word.arg or ""
                    keys[LORA.get(key, key if key.startswith("lora_") else f"lora_{key}")] = self.value(word.value)
        if keys.get("use_peft"):
            keys.pop("peft_config", None)
        return keys

    def data(self, key: str, value: ast.expr) -> dict[str, Any]:
        """Return what `load_dataset` was called with, if this argument is its result."""
        value = self.variables.get(value.id, value) if isinstance(value, ast.Name) else value
        if key != "train_dataset" or not isinstance(value, ast.Call):
            return {}
        if ast.unparse(value.func).rpartition(".")[2] != "load_dataset":
            return {}
        names = ("dataset_name", "dataset_config")
        keywords = {"path": names[0], "name": names[1], "split": "dataset_train_split"}
        keys = dict(zip(names, map(self.value, value.args), strict=False))
        return keys | {keywords[w.arg]: self.value(w.value) for w in value.keywords if w.arg in keywords}

    def value(self, node: ast.expr) -> Any:
        """Return a literal, also by its variable, and the place of a function; anything else as `$(text)`."""
        if isinstance(node, ast.Name) and node.id in self.variables:
            node = self.variables[node.id]
        if isinstance(node, ast.Name) and node.id in self.functions:
            return f"{self.path.name}:{node.id}"
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(part) for part in node.elts]
        number = arithmetic(ast.unparse(node))
        try:
            return ast.literal_eval(node) if number is None else number
        except (ValueError, TypeError, SyntaxError):
            return f"$({ast.unparse(node)})"


def scalar(text: str) -> Any:
    """Return the value of an argument: a number, true or false, null, a list or mapping, else text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    if text[:1] in "[{" or text.lower() in ("true", "false", "null", "none", "~"):
        # Hydra and JSON need no space behind a colon.
        spaced = re.sub(r"([\w\"']):(?=[^\s/])", r"\1: ", text) if text.startswith("{") else text
        with suppress(yaml.YAMLError, UserError):
            return None if text.lower() == "none" else parse_yaml(spaced, "an argument")
    return text


def overrides(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of Hydra's overrides, as in `a.b=c` and `+a.b=c`; other words are keys without a value."""
    for word in filter(None, words):  # the script's own arguments are none
        key, has_value, value = word.partition("=")
        if has_value and not key.startswith("-"):
            parsed = scalar(value)
            yield from (
                flat({key.lstrip("+~"): parsed}) if isinstance(parsed, dict) and parsed else [(key.lstrip("+"), parsed)]
            )
        else:
            yield key, value or None


def arguments(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of arguments, as in `--name value`, `--name=value`, and `--flag`."""
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if word.startswith("$") and word.endswith("[@]"):
            yield word[1:-3], word  # an array that another script sets
            continue
        is_number = re.fullmatch(r"-[\d.].*", word)
        if not word.startswith("-") or is_number:
            values.append(word)
            continue
        if name:
            read = [scalar(value) for value in values]
            yield name, True if not read else read[0] if len(read) == 1 else read
        elif values:
            yield values[0], None
        key, has_value, value = word.lstrip("-").partition("=")
        name, values = key.replace("-", "_"), [value] if has_value else []
