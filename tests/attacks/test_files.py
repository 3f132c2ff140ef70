"""Attacks 2, 5 and 7b: what a run trusts cannot be written from inside, sockets of the system are not there, code is
that of the start.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import braidrl
from braidrl.config import RewardConfig
from braidrl.native import building
from braidrl.rewards.pool import RewardPool
from braidrl.rewards.verifier import Completion, resolve
from tests.attacks.harness import WALLS, in_home, lost, made, needs_walls, refused
from tests.cases import soak_but

pytestmark = needs_walls
WRITES = {
    "overwrites it": "open(at.file, 'w').write('planted')",
    "changes it in place": "open(at.file, 'r+').write('planted')",
    "cuts it": "os.truncate(at.file, 1)",
    "removes it": "os.remove(at.file)",
    "renames a file over it": "open('/tmp/new', 'w').write('planted')\nos.rename('/tmp/new', at.file)",
    "puts a file beside it": "open(os.path.dirname(at.file) + '/sitecustomize.py', 'w').write('planted')",
    "links to it and writes there": "os.link(at.file, os.path.dirname(at.file) + '/link')",
    "changes its rights": "os.chmod(at.file, 0o777)",
    "goes through /proc": "open(f'/proc/self/root{at.file}', 'w').write('planted')",
    "mounts it anew": "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.mount(None, b'/', None, 0x20, None) == 0",
    "mounts it anew in namespaces of its own": "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.unshare(0x10020000) == 0\n"
    "assert libc.mount(None, b'/', None, 0x1020, None) == 0",
}
KERNEL = {
    "the pattern of core files": "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')",
    "the pattern through a mount of its own": "import ctypes\nassert ctypes.CDLL(None).mount(b'p', b'/tmp', b'proc', 0, None) == 0",
    "the disk": "import glob\nopen((glob.glob('/dev/[svn]d[a-z]') + glob.glob('/dev/nvme*'))[0], 'r+b')",
    "sysfs": "open('/sys/power/state', 'w').write('mem')",
}


@pytest.fixture(params=["a file of the home directory", "a kernel", "a package", "code of Braid", "its own code"])
def trusted(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file that a run trusts; what is written is put back."""
    package = Path(braidrl.__file__).parent
    files = {
        "a file of the home directory": in_home("file"),
        "a kernel": building.cache_folder() / "attacked.so",
        "a package": Path(pytest.__file__),
        "code of Braid": package / "rewards" / "verifiers.py",
        "its own code": Path(__file__).with_name("tries.py"),
    }
    file = files[request.param]
    own = not file.exists()
    if own:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("as it was")
    held, mode = file.read_bytes(), file.stat().st_mode
    yield file
    changed = not file.exists() or file.read_bytes() != held or file.stat().st_mode != mode
    beside = file.parent / "sitecustomize.py"
    planted = beside.exists()
    beside.unlink(missing_ok=True)
    if own:
        file.unlink(missing_ok=True)
    elif changed:
        file.write_bytes(held)
    assert not changed and not planted


@pytest.mark.parametrize("mode", WALLS)
def test_what_a_run_trusts_cannot_be_written(trusted: Path, mode: str) -> None:
    rows = [f"import os\n{text}\nwon = True" for text in WRITES.values()]
    outcomes = made(rows, mode, at={"file": str(trusted)})
    own_home = mode == "bubblewrap" and trusted.parent == Path.home()  # what is written there ends with the call
    for name, one in zip(WRITES, outcomes, strict=True):
        assert own_home or refused(one), (name, one)


@pytest.mark.parametrize("mode", WALLS)
def test_settings_of_the_kernel_and_disks_cannot_be_written(mode: str) -> None:
    for name, one in zip(KERNEL, made([f"{text}\nwon = True" for text in KERNEL.values()], mode), strict=True):
        assert refused(one) or (name == "the disk" and "IndexError" in one.detail), (name, one)


CONNECTS = {
    "by its path": "import socket\nsocket.socket(socket.AF_UNIX).connect(at.place)\nwon = True",
    "through the first process": "import socket\nsocket.socket(socket.AF_UNIX).connect(f'/proc/1/root{at.place}')\nwon = True",
    "from within its folder": "import os, socket\nos.chdir(os.path.dirname(at.place))\nsocket.socket(socket.AF_UNIX).connect('socket')\nwon = True",
    "by a program": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', f'import socket; socket.socket(socket.AF_UNIX).connect({at.place!r})'], check=True)\n"
    "won = True",
}


@pytest.mark.soak
@pytest.mark.parametrize("mode", WALLS)
@pytest.mark.parametrize("folder", ["/run", "/var/tmp", "/tmp", "/var/lib"])
def test_sockets_of_the_system_are_not_there(folder: str, mode: str) -> None:
    if not os.access(folder, os.W_OK):
        pytest.skip(f"{folder} cannot be written here")
    place = tempfile.mkdtemp(dir=folder)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{place}/socket")
            server.listen()
            outcomes = made([*CONNECTS.values()], mode, at={"place": f"{place}/socket"})
    finally:
        shutil.rmtree(place)
    for name, one in zip(CONNECTS, outcomes, strict=True):
        assert one.failure == "exception" and ("FileNotFoundError" in one.detail or name == "by a program"), (name, one)


LOOKS = {
    **{
        folder: f"import os\nwon = os.path.isdir('{folder}') and bool(os.listdir('{folder}'))"
        for folder in ("/run", "/srv", "/mnt", "/media", "/opt", "/boot", "/sys")
    },
    "a socket without a file": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0' + at.name)\nwon = True",
    "a socket of another program": "won = len(open('/proc/net/unix').readlines()) > 1",
}


def test_in_bubblewrap_there_is_nothing_but_what_python_needs() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0braid-attack-{os.getpid()}")
        server.listen()
        outcomes = made([*LOOKS.values()], "bubblewrap", at={"name": f"braid-attack-{os.getpid()}"})
    for name, one in zip(LOOKS, outcomes, strict=True):
        assert lost(one), (name, one)


def rename_over(code: Path, text: str) -> None:
    other = code.with_suffix(".new")
    other.write_text(text)
    other.rename(code)


CHANGES: dict[str, Callable[[Path, str], Any]] = {
    "overwritten": Path.write_text,
    "replaced": rename_over,
    "removed": lambda code, text: code.unlink(),
}


@pytest.mark.parametrize("change", soak_but(["replaced"], CHANGES))
def test_a_verifiers_code_is_that_of_the_runs_start(tmp_path: Path, change: str) -> None:
    code, other = tmp_path / "mine.py", tmp_path / "beside.py"
    other.write_text("SCORE = 0.25\n")
    code.write_text(
        f"import os, sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom beside import SCORE\n"
        "def mine(response):\n    if response == 'write':\n        open(__file__, 'a').write('\\nmine = lambda response: 1.0\\n')\n    return SCORE\n"
    )
    verifier = resolve(f"{code}:mine")
    with RewardPool(RewardConfig(timeout_s=20)) as pool:
        first, writing = (pool.submit(Completion("p", word, "a"), verifier).result(60) for word in ("ok", "write"))
        CHANGES[change](other, "SCORE = 1.0\n")
        CHANGES[change](code, "def mine(response):\n    return 1.0\n")
        pool._hosts[verifier.key].kill()
        later = pool.submit(Completion("p", "ok", "a"), verifier).result(60)
    assert (first.score, writing.failure, later.score) == (0.25, "exception", 0.25), (first, writing, later)


DAMAGES = ("cut", "overwritten", "planted under its name", "empty")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_kernel_is_compiled_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n")
    first = building.build(source)
    if first is None:
        pytest.skip("no compiler works here")
    assert first.one() == 1
    (kept,) = (tmp_path / "braidrl").glob("*.so")
    whole = kept.read_bytes()
    kept.unlink()  # this process has it open
    planted = building.build(Path(shutil.copy(source, tmp_path / "two.c")), PLANTED=1)
    assert planted is not None
    (other,) = (tmp_path / "braidrl").glob("two-*.so")
    texts = {
        "cut": whole[: len(whole) // 2],
        "overwritten": b"\x7fELF" + whole[::-1],
        "empty": b"",
        "planted under its name": other.read_bytes(),
    }
    kept.write_bytes(texts[damage])
    again = building.build(source)
    assert isinstance(again, ctypes.CDLL) and again.one() == 1
    (kept_again,) = (tmp_path / "braidrl").glob("one-*.so")
    assert kept_again.read_bytes() == whole or damage == "planted under its name"


def test_a_lost_try_is_not_taken_for_a_won_one() -> None:
    (outcome,) = made(["won = True"])
    assert not lost(outcome)
