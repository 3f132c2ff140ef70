"""The table of the security page: each cell by one probe in each mode."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.harness import in_home, made, needs_walls

pytestmark = needs_walls
QUESTIONS = {
    "processes": "sees other processes, can signal or trace them",
    "environment": "has all variables of the run's environment; else PATH and the like, and those that are named",
    "memory": "has no limits of memory (private, shared, /tmp), processes, threads, files, output and processor time",
    "leftovers": "leaves processes, files in /tmp and /dev/shm, shared memory or keys behind a call or trajectory",
    "writes": "writes what the run trusts: kernels, packages, code, configuration, run folder, home",
    "devices": "changes settings of the kernel or opens disks, where it runs as root",
    "sockets": "reaches UNIX sockets below /run, /var and /tmp",
    "reads": "reads files beside Python, libraries and the folder of its own code",
    "home": "reads the home directory; else it has an empty one",
    "network": "reaches the network, with UNIX sockets that have no file; an agent always reaches its endpoint",
}
ALLOWED = {"process": {"reads", "home", "network"}, "bubblewrap": set[str](), "none": set(QUESTIONS)}
# Each probe says `won` where the code can do it.
PROBES = {
    "processes": "import os\nwon = os.path.exists(f'/proc/{at.run}/status')\nos.kill(at.run, 0)",
    "environment": "import os\nwon = os.environ.get('AWS_SECRET') == 'hush'",
    "memory": (
        "import os\nfor n in range(20):\n    if os.fork() == 0:\n        os._exit(0)\nwon = True\nheld = "
        "bytearray(b'1') * (600 << 20)\n"
    ),
    "leftovers": (
        "import os, time\nleft = os.path.exists(f'/tmp/{at.mark}')\nopen(f'/tmp/{at.mark}', 'w').close()\nwon = left"
    ),
    "writes": "open(at.file, 'r+').close()\nwon = True",
    "devices": "import os\nos.close(os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY))\nwon = True",
    "sockets": "import socket\nsocket.socket(socket.AF_UNIX).connect(at.socket)\nwon = True",
    "reads": "import os\nwon = bool(open(at.elsewhere).read())",
    "home": "won = bool(open(at.file).read())",
    "network": (
        "import socket\nsocket.create_connection(('127.0.0.1', at.port), "
        "2)\nsocket.socket(socket.AF_UNIX).connect('\\0' + at.mark)\nwon = True"
    ),
}


@pytest.fixture
def around() -> Iterator[dict[str, Any]]:
    """Make the probes' targets: a file in the home directory, one elsewhere, a socket of each kind, a variable."""
    file = in_home("probe")
    file.write_text("trusted")
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        socket.socket(socket.AF_UNIX) as unix,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as unnamed,
    ):
        unix.bind(f"{folder}/socket")
        mark = f"braid-probe-{os.getpid()}"
        unnamed.bind(f"\0{mark}")
        for one in (unix, unnamed):
            one.listen()
        yield {
            "run": os.getpid(),
            "file": str(file),
            "socket": f"{folder}/socket",
            "elsewhere": "/etc/fstab" if os.path.exists("/etc/fstab") else "/etc/os-release",
            "port": server.getsockname()[1],
            "mark": mark,
        }
        Path("/tmp", mark).unlink(missing_ok=True)
    file.unlink()


@pytest.mark.parametrize("mode", ALLOWED)
def test_each_cell_of_the_security_pages_table_is_what_a_probe_finds(
    mode: str, around: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET", "hush")
    asked = [name for name in QUESTIONS if name != "devices" or os.getuid() == 0]
    rows = [
        PROBES["leftovers"],
        *(PROBES[name] for name in asked),
    ]  # the second probe of this kind looks for what the first has left
    outcomes = made(rows, mode, at=around, memory_gib=0.5, max_processes=16)[1:]
    for name, one in zip(asked, outcomes, strict=True):
        assert (one.correct is True) == (name in ALLOWED[mode]), (name, mode, one)


def test_the_security_page_has_the_table_of_the_policies() -> None:
    lines = ["| code in the sandbox | " + " | ".join(f"`{mode}`" for mode in ALLOWED) + " |", "|---|---|---|---|"]
    for name, question in QUESTIONS.items():
        cells = ("yes" if name in ALLOWED[mode] else "no" for mode in ALLOWED)
        lines.append(f"| {question} | {' | '.join(cells)} |")
    assert "\n".join(lines) in Path("docs/security.md").read_text()
    assert set(PROBES) == set(QUESTIONS)
