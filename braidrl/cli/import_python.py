"""Reading of TRL's scripts in Python: the keywords of its trainer's calls, by the names of TRL's commands.

A script is read, never run. An expression whose value the script does not state stays as `$(text)`.
"""

import ast
import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from braidrl.cli.import_scripts import arithmetic
from braidrl.errors import UserError
from braidrl.parsing import read_text

TRAINER = re.compile(r"(?:^|\.)(?:(?:Async)?GRPO|RLOO|DPO|SFT|Reward)(Trainer|Config)$")
"""TRL's classes, by whose calls its scripts in Python are read."""
FILES = ("json", "parquet", "csv", "arrow", "text")
"""Names by which `load_dataset` reads files."""
LORA = {"r": "lora_r"}
"""Arguments of peft's LoraConfig whose names do not begin with `lora_` in TRL's commands."""


class WithVariables(ast.NodeTransformer):
    """Replaces at most a given number of variables in an expression by what the script assigns to them."""

    def __init__(self, variables: Mapping[str, ast.expr], most: int = 100) -> None:
        self.variables, self.left = variables, most
        self.open: list[str] = []
        """The variables whose expressions are being replaced; one that is assigned from itself stays a name."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the expression of a variable."""
        if node.id not in self.variables or node.id in self.open or not self.left:
            return node
        self.left -= 1
        self.open.append(node.id)
        replaced: ast.expr = self.visit(copy.deepcopy(self.variables[node.id]))
        self.open.pop()
        return replaced


class PythonScript:
    """A Python script that calls TRL's trainer: the keywords of its calls, as far as the script states their values."""

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
        imports = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)]
        self.rewards = {
            name.asname or name.name: name.name
            for node in imports
            if node.module == "trl.rewards"
            for name in node.names
        }
        """TRL's reward functions by their names in the script."""

    def command(self) -> str:
        """Return the name of the trainer that is called, as in `grpo`; an empty text for none."""
        called = [ast.unparse(node.func) for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        names = [name.rpartition(".")[2] for name in called if TRAINER.search(name)]
        return next((re.sub(r"Trainer|Config", "", name).lower() for name in names), "")

    def source_keys(self) -> dict[str, Any]:
        """Return keys and values, by the names of TRL's commands."""
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
        """Return the arguments of `load_dataset`, if this argument is its result."""
        value = self.variables.get(value.id, value) if isinstance(value, ast.Name) else value
        if key != "train_dataset" or not isinstance(value, ast.Call):
            return {}
        if ast.unparse(value.func).rpartition(".")[2] != "load_dataset":
            return {}
        names = ("dataset_name", "dataset_config")
        keywords = {"path": names[0], "name": names[1], "split": "dataset_train_split"}
        keys = dict(zip(names, map(self.value, value.args), strict=False))
        for word in value.keywords:
            keys[keywords.get(word.arg or "", f"dataset_{word.arg}")] = self.value(word.value)
        files = keys.get("dataset_data_files")
        if keys.get("dataset_name") in FILES and isinstance(files, str):
            # Files of one kind have the split `train` alone.
            keys = {name: v for name, v in keys.items() if (name, v) != ("dataset_train_split", "train")}
            keys["dataset_name"] = keys.pop("dataset_data_files")
        return keys

    def value(self, node: ast.expr) -> Any:
        """Return a literal or the literal of a variable, a function's location, or the name of TRL's reward function or
        of the function that makes it; anything else as `$(text)`.
        """
        node = WithVariables(self.variables).visit(copy.deepcopy(node))
        if isinstance(node, ast.Name) and node.id in self.functions:
            return f"{self.path.name}:{node.id}"
        named = node.func if isinstance(node, ast.Call) else node
        if isinstance(named, ast.Name) and named.id in self.rewards:
            return self.rewards[named.id]
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(part) for part in node.elts]
        number = arithmetic(ast.unparse(node))
        try:
            return ast.literal_eval(node) if number is None else number
        except (ValueError, TypeError, SyntaxError):
            return f"$({ast.unparse(node)})"
