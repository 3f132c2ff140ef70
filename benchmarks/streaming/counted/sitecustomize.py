"""Counts the bytes that processes copy in host memory while they write or load a version of the weights.

Python imports this file in every process of a run whose PYTHONPATH begins with its folder. Each call below adds a line
to the file BRAID_COUNTED: its kind, the bytes that torch wrote into memory, and those that the thread gave to the
operating system.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

CALLS = {
    # The first module is that of 0450740; the others are today's.
    "braidrl.runtimes.streaming.weights": {
        "WeightExport._write": "write",
        "WeightReceiver.load": "load",
        "WeightReceiver.receive": "receive",
    },
    "braidrl.weights.file": {"WeightWriter.write": "write"},
    "braidrl.engines.embedded.embedded_engine": {"EmbeddedEngine.publish": "load"},
}
UNFILLED = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::from_file"}
inside = threading.local()


def given_to_the_system() -> int:
    """Return the bytes that this thread has passed to `write` and its like."""
    return int(Path("/proc/thread-self/io").read_text().split("wchar: ")[1].split()[0])


def counted(call: Any, kind: str) -> Any:
    """Return a call that counts what it copies; calls inside it are part of it."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Copies(TorchDispatchMode):
        """Counts every operator's results, other than views and memory that is not filled."""

        copied = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            aliases = [result.alias_info for result in func._schema.returns]
            fills = all(alias is None or alias.is_write for alias in aliases) and func._schema.name not in UNFILLED
            self.copied += sum(leaf.nbytes for leaf in tree_leaves(found) if fills and isinstance(leaf, Tensor))
            return found

    @functools.wraps(call)
    def with_count(*args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "call", False):
            return call(*args, **kwargs)
        inside.call, copies, before = True, Copies(), given_to_the_system()
        try:
            with copies:
                return call(*args, **kwargs)
        finally:
            inside.call = False
            line = {"kind": kind, "torch": copies.copied, "system": given_to_the_system() - before}
            with open(os.environ["BRAID_COUNTED"], "a") as file:
                file.write(json.dumps(line) + "\n")

    return with_count


class Counting(importlib.abc.MetaPathFinder):
    """Replaces the calls once their module is loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in CALLS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            for name, kind in CALLS[fullname].items():
                owner, method = name.split(".")
                if hasattr(module, owner):
                    setattr(getattr(module, owner), method, counted(getattr(getattr(module, owner), method), kind))

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


if "BRAID_COUNTED" in os.environ:
    sys.meta_path.insert(0, Counting())
