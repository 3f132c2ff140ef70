"""Reading of other frameworks' configurations: YAML files, and shell scripts that end in a command with arguments.

script ──variables, arrays, continued lines──▶ words of the command ──overrides or --arguments──▶ keys and values

A script is read, never run. Values that only the shell knows stay as `$NAME`.
"""

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from braidrl.errors import UserError
from braidrl.parsing import flat, parse_yaml, read_text

ASSIGNED = re.compile(r"^(\w+)(\+?)=", re.DOTALL)
ARRAY = re.compile(
    r"(?:^|;|(&&|\|\|)|\b(?:then|do|else)\b)[ \t]*(?:(?:export|local|readonly|typeset|declare)(?:[ \t]+-\w+)*[ \t]+)*"
    r"(\w+)(\+?)=\(",
    re.MULTILINE,
)
"""The beginning of an array; `&&` or `||` before it is a condition."""
ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
COMMAND = re.compile(r"\$\([^()]*\)|`[^`]*`")
WHOLE_ARRAY = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
VARIABLE = re.compile(r"\$(\w+|[@*#])")
DEFAULT = re.compile(r":?([-=+?])(.*)", re.DOTALL)
HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1")
READ_INTO = re.compile(r"\s*read\b[^<]*?(\w+)\s*<<")
"""`read`, with its options, of a here-document into a variable."""
REDIRECTION = re.compile(r"(?:(?<=\s)\d+|&)?[<>]+(?:&\d*-?|\s*[^\s;|&]+)")
PREFIXES = ("export", "declare", "local", "readonly")
KEYWORDS = ("then", "do", "else", "elif", "{", "!", "time", "exec")
OPENING, CLOSING = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
MOST_EXPANDED = 1 << 20
"""Maximum number of characters of an expanded line."""
WHOLE = ("engine_kwargs.vllm", "apply_chat_template_kwargs", "override_config")
"""Ends of keys whose value is a mapping."""
COMMAND_LINE = "command line"
"""The key of the words that start a program, which say which one it is."""
UNKNOWN_TO_READERS = re.compile(r"\$[\w{(]")


def arithmetic(text: str) -> int | None:
    """Return the value of a sum or product of whole numbers; None for other text."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            power = value(node.right)
            if not 0 <= power < 64:
                raise ValueError
            return int(value(node.left) ** power)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            result = OPERATORS[type(node.op)](value(node.left), value(node.right))
            return int(result)
        raise ValueError

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


class Shell:
    """The variables and arrays of a script, as far as it sets them."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {"HOME": "~"}
        self.arrays: dict[str, list[str]] = {}
        self.files = set[Path]()
        """The scripts that were read."""

    def expanded(self, text: str) -> str:
        """Return a line with its variables, arrays and sums expanded. Unknown ones are unchanged."""
        text = WHOLE_ARRAY.sub(lambda m: shlex.join(self.arrays[m[1]]) if m[1] in self.arrays else f"${m[1]}[@]", text)
        text = VARIABLE.sub(lambda m: self.plain(m[1], m[0]), self.with_braces(text))
        if len(text) > MOST_EXPANDED:
            raise UserError(f"a line of the script has more than {MOST_EXPANDED} characters with its variables")
        # In a sum a variable needs no `$`.
        summed = partial(re.sub, r"[A-Za-z_]\w*", lambda m: self.variables.get(m[0], m[0]))
        text = ARITHMETIC.sub(
            lambda m: "".join(m[0].split()) if (n := arithmetic(summed(m[1]))) is None else str(n), text
        )
        return COMMAND.sub(lambda m: "" if m[0].startswith("`#") else "$SHELL_COMMAND", text)

    def plain(self, name: str, unknown: str) -> str:
        """Return the value of a variable or the first of an array.

        The script's arguments are empty.
        """
        if name in ("@", "*", "#"):
            return ""
        return self.variables.get(name, shlex.join(self.arrays[name][:1]) if name in self.arrays else unknown)

    def with_braces(self, text: str) -> str:
        """Return a text with its `${...}`, which may hold others."""
        begin = text.find("${")
        while begin >= 0:
            depth, end = 0, begin + 1
            while end < len(text):
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                if depth == 0:
                    break
                end += 1
            made = self.parameter(text[begin + 2 : end])
            replaced = text[begin : end + 1] if made is None else made
            text = text[:begin] + replaced + text[end + 1 :]
            if len(text) > MOST_EXPANDED:
                raise UserError(f"a line of the script has more than {MOST_EXPANDED} characters with its variables")
            begin = text.find("${", begin + len(replaced))
        return text

    def parameter(self, inner: str) -> str | None:
        """Return the value of `${inner}` with its default or its end cut off; None if it is unknown."""
        if inner[:1] in ("@", "*"):
            return ""
        match = re.fullmatch(r"(\w+)(.*)", inner, re.DOTALL)
        if match is None:
            return None
        name, rest = match.groups()
        value = self.plain(name, "") or None
        if not rest:
            return value
        if default := DEFAULT.fullmatch(rest):
            kind, other = default.groups()
            if kind == "+":
                return self.expanded(other) if value else ""
            if value is None and kind in "-=":
                value = self.expanded(other)
                if kind == "=":
                    self.variables[name] = value
            return value
        if value is not None and rest[0] in "%#":
            return cut_off(value, rest[0], rest.lstrip(rest[0]), rest[:2] == 2 * rest[0])
        return None

    def words(self, text: str) -> list[str]:
        """Return the words of a command, or of the text that it executes. Raises UserError for an unbalanced quote."""
        try:
            words = shlex.split(self.expanded(text), comments=True)
            for number, word in enumerate(words[:-1]):
                if word == "eval" or (word == "-c" and words[number - 1] in ("bash", "sh")):
                    return words[:number] + shlex.split(" ".join(words[number + 1 :]), comments=True)
        except ValueError as error:
            raise UserError(f"a command of the script cannot be read: {error}") from None
        return words

    def assign(self, words: Sequence[str], keep: bool = True) -> bool:
        """Set variables if the words are assignments, unless these are not kept; return True if they are."""
        while words and (words[0] in PREFIXES or words[0].startswith("-")):
            words = words[1:]
        if not words or not all(ASSIGNED.match(word) for word in words):
            return False
        for word in words if keep else ():
            name, adds, value = word.partition("=")[0].rstrip("+"), "+=" in word[: word.index("=") + 1], word
            value = word.partition("=")[2]
            self.variables[name] = self.variables.get(name, "") + value if adds else value
        return True


def cut_off(value: str, end: str, pattern: str, longest: bool) -> str:
    """Return a text without the end (`%`) or the beginning (`#`) that matches a pattern of the shell."""
    cuts = range(len(value) + 1)
    for cut in reversed(cuts) if longest == (end == "#") else cuts:
        part, rest = (value[cut:], value[:cut]) if end == "%" else (value[:cut], value[cut:])
        if part and fnmatchcase(part, pattern):
            if end == "%" and not longest:
                return max((value[:n] for n in cuts if value[n:] and fnmatchcase(value[n:], pattern)), key=len)
            return rest
    return value


def script_lines(text: str) -> Iterator[str]:
    """Yield the logical lines of a script: continued lines are joined, and a quoted text may span lines."""
    uncommented = "\n".join(line for line in without_here_documents(text) if not line.lstrip().startswith("#"))
    pending = ""
    for line in re.sub(r"[ \t]*\\[ \t]*\n", " ", uncommented).split("\n"):
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


def without_here_documents(text: str) -> Iterator[str]:
    """Yield the lines of a script without the texts that it writes to files, as in `cat > FILE <<EOF`; one that `read`
    assigns to a variable becomes an assignment.
    """
    end, name, words = None, "", list[str]()
    for line in text.splitlines():
        if end is None:
            match = None if line.lstrip().startswith("#") else HERE_DOCUMENT.search(line)
            end = match[2] if match else None
            into = READ_INTO.match(line) if match else None
            name, words = into[1] if into else "", []
            if not into:
                yield line if match is None else line[: match.start()] + line[match.end() :]
        elif line.strip() == end:
            end = None
            if name:
                text_of_variable = " ".join(words).replace('"', '\\"')
                yield f'{name}="{text_of_variable}"'
        else:
            words.append(line.strip().removesuffix("\\").strip())


def simple_commands(line: str) -> Iterator[str]:
    """Yield the commands of a line, which `;`, `&` and `|` separate, without redirections of their output."""
    command, quote, closing, at = "", "", list[str](), 0
    while at < len(line):
        char = line[at]
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char == "(" or line[at - 1 : at + 1] == "${":
            closing.append(")" if char == "(" else "}")
        elif closing and char == closing[-1]:
            closing.pop()
        elif not closing and (match := REDIRECTION.match(line, at)):
            at, char = match.end() - 1, " "
        elif not closing and char in ";|&":
            yield command
            command, char = "", ""
        if char == "\\" and quote != "'":
            command, at = command + line[at : at + 2], at + 2
            continue
        command, at = command + char, at + 1
    yield command


class Array(NamedTuple):
    """An assignment of an array in a script."""

    name: str
    adds: bool
    is_conditional: bool
    body: str
    start: int
    end: int


def arrays_in(text: str) -> Iterator[Array]:
    """Yield the arrays that a script assigns, which may span lines and hold comments, quotes and sums."""
    begin = 0
    while match := ARRAY.search(text, begin):
        begin = match.end()
        line = text[text.rfind("\n", 0, match.start(2)) + 1 : match.start(2)]
        end = None if line.lstrip().startswith("#") else end_of_array(text, match.end())
        if end is not None:
            starts = match.start() + (len(match[1]) if match[1] else 0)
            starts += not match[1] and text[starts] == ";"
            yield Array(match[2], bool(match[3]), bool(match[1]), text[match.end() : end], starts, end + 1)
            begin = end + 1


def end_of_array(text: str, at: int) -> int | None:
    """Return the position of the parenthesis that closes an array; None without one."""
    depth, quote = 1, ""
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and text[at - 1] in " \t\n(":
            at = text.find("\n", at)
            if at < 0:
                return None
        else:
            depth += {"(": 1, ")": -1}.get(char, 0)
            if not depth:
                return at
        at += 1
    return None


def read_commands(path: Path, conditional: bool = True, shell: Shell | None = None) -> list[list[str]]:
    """Return the words of each command of a script, with its variables expanded, as if every `if` and loop were run;
    without `conditional`, no variable is set there.
    """
    shell, commands, depth = shell or Shell(), list[list[str]](), 0
    shell.files.add(path.resolve())
    text = read_text(path)
    rest, begin = "", 0
    # Arrays are replaced by a line that assigns them, in their order.
    arrays = {f"__array__{number}": array for number, array in enumerate(arrays_in(text))}
    for name, array in arrays.items():
        rest += f"{text[begin : array.start]}\n{name} "
        begin = array.end
    for command in (part for line in script_lines(rest + text[begin:]) for part in simple_commands(line)):
        first, *_ = command.split(maxsplit=1) or [""]
        depth += (first in OPENING) - (first in CLOSING)
        if first in arrays:
            if conditional or not (depth or arrays[first].is_conditional):
                assign_array(shell, arrays[first])
            continue
        # An unreadable line may be irrelevant.
        try:
            words = shell.words(command)
        except UserError:
            if "python" in command or "trl " in command:
                raise
            continue
        while words and (words[0] in KEYWORDS or (depth and words[0].endswith(")"))):
            words = words[1:]  # also the pattern of a `case`
        if words and not shell.assign(words, conditional or not depth):
            file = sourced(words, path)
            commands += read_commands(file, conditional, shell) if file and file not in shell.files else [words]
    return commands


def sourced(words: Sequence[str], path: Path) -> Path | None:
    """Return the script that a command reads into this one, if it is on this machine."""
    if words[0] not in ("source", ".") or len(words) < 2:
        return None
    # The script's own folder is what `$(cd "$(dirname "$0")" && pwd)` stands for.
    name = re.sub(r"^\$[\w()]+/", "", words[1])
    file = (path.parent / name).resolve()
    return file if file.is_file() else None


def assign_array(shell: Shell, array: Array) -> None:
    words = shell.words(array.body.replace("\\\n", " "))
    shell.arrays[array.name] = (shell.arrays.get(array.name, []) if array.adds else []) + words


HYDRA_OPTIONS = {
    "-cn": "--config-name",
    "--config-name": "--config-name",
    "-cp": "--config-path",
    "--config-path": "--config-path",
    "-cd": "--config-dir",
    "--config-dir": "--config-dir",
}
"""Hydra's options whose value is the next word."""


def scalar(text: str) -> Any:
    """Return the value of an argument: a number, true or false, null, a list or mapping, otherwise text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    if text[:1] in "[{" or text.lower() in ("true", "false", "null", "none", "~"):
        # Hydra and JSON need no space after a colon.
        spaced = re.sub(r"([\w\"']):(?=[^\s/])", r"\1: ", text) if text.startswith("{") else text
        with suppress(yaml.YAMLError, UserError):
            return None if text.lower() == "none" else parse_yaml(spaced, "an argument")
    return text


def overrides(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of Hydra's overrides, as in `a.b=c` and `+a.b=c`; other words are keys without a value,
    and a removed key keeps its `~`.
    """
    option = ""
    for word in filter(None, words):  # the script has no arguments
        key, has_value, value = word.partition("=")
        if word in HYDRA_OPTIONS:
            option = HYDRA_OPTIONS[word]
        elif option and not word.startswith("-"):
            yield option, word
            option = ""
        elif has_value and not key.startswith(("-", "~")):
            parsed = scalar(value)
            yield from (
                flat({key.lstrip("+"): parsed}, WHOLE)
                if isinstance(parsed, dict) and parsed
                else [(key.lstrip("+"), parsed)]
            )
        else:
            yield (word, None) if word.startswith("~") else (key, value or None)


def arguments(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of arguments, as in `--name value`, `--name=value`, and `--flag`."""
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if word.startswith("$") and word.endswith("[@]"):
            yield word[1:-3], word  # an array set by another script
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
