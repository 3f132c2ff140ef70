"""Attack 3: nothing that a call leaves is there for the next one."""

from __future__ import annotations

import pytest

from tests.attacks.harness import WALLS, made, needs_walls, nothing_left

pytestmark = needs_walls
FILE = "import os, pathlib\nplace = pathlib.Path({place!r}).expanduser() / 'random.py'\n"
LEAVE = "place.write_text('left')\nwon = True"
LOOK = "won = place.exists()"
KEYS = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
# What the first row does, what the second one looks for, the modes in which the first may succeed.
TRIES = {
    "a module in /tmp": (FILE.format(place="/tmp") + LEAVE, FILE.format(place="/tmp") + LOOK, WALLS),
    "a file in /dev/shm": (FILE.format(place="/dev/shm") + LEAVE, FILE.format(place="/dev/shm") + LOOK, WALLS),
    "a file in /var/tmp": (FILE.format(place="/var/tmp") + LEAVE, FILE.format(place="/var/tmp") + LOOK, WALLS),
    "a file that a program leaves": (
        FILE.format(place="/tmp")
        + "import subprocess\nsubprocess.run(['/bin/sh', '-c', f'echo left > {place}'], check=True)\nwon = True",
        FILE.format(place="/tmp") + LOOK,
        WALLS,
    ),
    "a file that a program leaves in its folder": (
        FILE.format(place=".")
        + (
            "import subprocess, sys\nsubprocess.run([sys.executable, '-c', f'open({str(place)!r}, \"w\")'], "
            "check=True)\nwon = True"
        ),
        FILE.format(place=".") + LOOK,
        (),
    ),
    "files that are open in a program that stays": (
        "import subprocess\nheld = subprocess.Popen(['/bin/sh', '-c', 'exec 3> /var/tmp/held; sleep 60'], "
        "start_new_session=True)\nwon = True",
        "import os\nwon = os.path.exists('/var/tmp/held') or len([p for p in os.listdir('/proc') if p.isdecimal()]) "
        "> 1",
        WALLS,
    ),
    "a link to a folder of the next call": (
        "import os\nos.symlink('/proc/self/fd', '/tmp/link')\nwon = True",
        "import os\nwon = os.path.lexists('/tmp/link')",
        WALLS,
    ),
    "a file in the home directory": (FILE.format(place="~") + LEAVE, FILE.format(place="~") + LOOK, ("bubblewrap",)),
    "a file in /dev": (FILE.format(place="/dev") + LEAVE, FILE.format(place="/dev") + LOOK, ()),
    "a file in /": (FILE.format(place="/") + LEAVE, FILE.format(place="/") + LOOK, ()),
    "a message queue": (
        KEYS + "won = libc.mq_open(b'/braid-left', 0o102, 0o600, None) >= 0",
        KEYS + "won = libc.mq_open(b'/braid-left', 0o2, 0o600, None) >= 0",
        WALLS,
    ),
    "System V memory": (
        KEYS + "won = libc.shmget(0x627261, 4096, 0o1600) >= 0",
        KEYS + "won = libc.shmget(0x627261, 0, 0) >= 0",
        (),
    ),
    "a key of the kernel": (
        KEYS + "won = libc.syscall(248, b'user', b'braid', b'left', 4, -4) >= 0",
        KEYS + "won = libc.syscall(249, b'user', b'braid', None, -4) >= 0",
        (),
    ),
    "a process that puts the file there later": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(0.5)\n    open('/tmp/later', 'w')\n    "
        "time.sleep(60)\nwon = True",
        "import os, time\ntime.sleep(1)\nwon = os.path.exists('/tmp/later') or len([p for p in os.listdir('/proc') "
        "if p.isdecimal()]) > 1",
        WALLS,
    ),
    "a change in the process that is copied": (
        "import json, sys\nsys.modules['json'].loads = None\nwon = True",
        "import json\nwon = json.loads is None",
        WALLS,
    ),
}


@pytest.mark.parametrize("mode", WALLS)
def test_nothing_that_a_row_leaves_reaches_the_next_row(mode: str) -> None:
    pairs = [row for leave, look, _ in TRIES.values() for row in (leave, look)]
    with nothing_left():
        outcomes = made(pairs, mode)
    for name, (_, _, possible), first, second in zip(TRIES, TRIES.values(), outcomes[::2], outcomes[1::2], strict=True):
        assert first.correct is True or mode not in possible, (name, first)
        assert second.correct is False, (name, second)
