"""Attack 4: all memory of a call counts, of whatever kind, also of processes that have ended."""

from __future__ import annotations

import pytest

from tests.attacks.harness import made, needs_walls, nothing_left, refused

pytestmark = needs_walls
# Each try takes 1.5 GiB with a limit of 0.5; each line that is reached then says `won`.
C = "import ctypes, mmap, os, time\nlibc = ctypes.CDLL(None, use_errno=True)\nMIB = bytes(1 << 20)\n"
SHARED = (
    C
    + "def shared(mib):\n    held = mmap.mmap(-1, mib << 20)\n    for _ in range(mib):\n        held.write(MIB)\n    return held\n"
)
TRIES = {
    "memfds": C
    + "held = [os.memfd_create(str(n)) for n in range(30)]\nfor one in held:\n    for _ in range(50):\n        os.write(one, MIB)\n"
    "won = True",
    "memfds by number": C + "number = libc.syscall(319, b'x', 0)\nassert number >= 0\nwon = True",
    "shared mappings of many processes": SHARED
    + "for _ in range(8):\n    if os.fork() == 0:\n        held = shared(200)\n"
    "        time.sleep(60)\ntime.sleep(8)\nwon = True",
    "a shared mapping that is kept by a process which never touched it": SHARED
    + "kept = [mmap.mmap(-1, 300 << 20) for _ in range(1)]\nheld = []\nfor n in range(5):\n    one = mmap.mmap(-1, 40 << 20)\n"
    "    held.append(one)\nfor one in kept + held:\n    if os.fork() == 0:\n        for _ in range(len(one) >> 20):\n            one.write(MIB)\n"
    "        os._exit(0)\n    os.wait()\ntime.sleep(2)\nwon = True",
    "System V segments": C
    + "held = [libc.shmget(0, 200 << 20, 0o1600) for _ in range(8)]\nassert min(held) >= 0\nwon = True",
    "secret memory": C + "assert libc.syscall(447, 0) >= 0\nwon = True",
    "memfds by the number of another interface": C + "assert libc.syscall(0x40000000 | 319, b'x', 0) >= 0\nwon = True",
    "a shared mapping of the device of zeros": C
    + "zeros = os.open('/dev/zero', os.O_RDWR)\nfor _ in range(8):\n    if os.fork() == 0:\n"
    "        held = mmap.mmap(zeros, 200 << 20, mmap.MAP_SHARED)\n        for _ in range(200):\n            held.write(MIB)\n        time.sleep(60)\n"
    "time.sleep(8)\nwon = True",
    "System V semaphores": C + "assert libc.semget(0, 32000, 0o1600) >= 0\nwon = True",
    "buffers of sockets that were made larger": C + "import socket\nheld = socket.socketpair()\nfor one in held:\n"
    "    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)\n    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > 1 << 20\nwon = True",
    "messages of sockets that are closed": C
    + "import socket\nheld = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(200)]\n"
    "for n, one in enumerate(held):\n    one.bind(f'/tmp/{n}')\n    for _ in range(10):\n        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(bytes(100000), f'/tmp/{n}')\nwon = True",
    "connections that nothing accepts": C
    + "import socket\nheld = [socket.socket(socket.AF_UNIX) for _ in range(8)]\nfor n, one in enumerate(held):\n"
    "    one.bind(f'/tmp/{n}')\n    one.listen(4000)\n    for _ in range(1000):\n        other = socket.socket(socket.AF_UNIX)\n        other.connect(f'/tmp/{n}')\n"
    "        other.setblocking(False)\n        try:\n            while other.send(MIB[:100000]):\n                pass\n        except BlockingIOError:\n            other.close()\n"
    "time.sleep(2)\nwon = True",
    "buffers of socket pairs": C
    + "import socket, resource\nheld = []\nfor _ in range(8):\n    if os.fork() == 0:\n        for _ in range(120):\n"
    "            held += socket.socketpair()\n            for one in held[-2:]:\n                one.setblocking(False)\n                try:\n                    while one.send(MIB):\n"
    "                        pass\n                except BlockingIOError:\n                    pass\n        time.sleep(60)\ntime.sleep(8)\nwon = True",
    "System V queues": C + "assert libc.msgget(0, 0o1600) >= 0\nwon = True",
    "files in its own folders": C + "for place in ('/tmp', '/dev/shm', '/var/tmp'):\n    for n in range(8):\n"
    "        with open(f'{place}/{n}', 'wb') as file:\n            for _ in range(60):\n                file.write(MIB)\nwon = True",
    "files and memory together": C
    + "for n in range(4):\n    with open(f'/tmp/{n}', 'wb') as file:\n        for _ in range(50):\n"
    "            file.write(MIB)\nheld = bytearray(b'1') * (350 << 20)\ntime.sleep(2)\nwon = True",
    "mappings whose list is long to read": C + "libc.mmap.restype = ctypes.c_void_p\nos.fork()\n"
    "for n in range(60000):\n    libc.mmap(None, 4096, n % 2, 0x4022, -1, 0)\ntime.sleep(20)\nwon = True",
    "a tmpfs in namespaces of its own": C + "assert libc.unshare(0x10020000) == 0\n"
    "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0\nwon = True",
    "pages kept in pipes": C
    + "class Part(ctypes.Structure):\n    _fields_ = [('at', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
    "held = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\nread, write = os.pipe()\n"
    "part = Part(ctypes.addressof(ctypes.c_char.from_buffer(held)), 1 << 16)\n"
    "assert libc.vmsplice(write, ctypes.byref(part), 1, 0) > 0\nwon = True",
    "pages of a file moved into pipes": C
    + "with open('/tmp/one', 'wb') as file:\n    file.write(MIB)\nfile = os.open('/tmp/one', os.O_RDONLY)\nread, write = os.pipe()\n"
    "assert os.splice(file, write, 1 << 16) > 0\nwon = True",
    "pages copied between pipes": C
    + "one, other = os.pipe(), os.pipe()\nos.write(one[1], bytes(4096))\nassert libc.tee(one[0], other[1], 4096, 0) > 0\nwon = True",
    "pipes that were made larger": C
    + "import fcntl\nread, write = os.pipe()\nassert fcntl.fcntl(write, 1031, 1 << 20) > 0\nwon = True",
    "many pipes": C
    + "for _ in range(50):\n    if os.fork() == 0:\n        for _ in range(124):\n            one = os.pipe()\n"
    "            os.set_blocking(one[1], False)\n            os.write(one[1], MIB[: 1 << 16])\n        time.sleep(60)\ntime.sleep(8)\nwon = True",
    "huge pages": C
    + "held = mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)\nwon = True",
    "empty files": C
    + "for n in range(15000):\n    for place in ('/tmp', '/dev/shm', '/var/tmp'):\n        open(f'{place}/{n}', 'w').close()\nheld = bytearray(b'1') * (475 << 20)\ntime.sleep(3)\nwon = True",
    "memory of many processes": C
    + "for _ in range(8):\n    if os.fork() == 0:\n        held = bytearray(b'1') * (200 << 20)\n        time.sleep(60)\n"
    "time.sleep(8)\nwon = True",
}


@pytest.mark.parametrize("mode", ["process", pytest.param("bubblewrap", marks=pytest.mark.soak)])
def test_no_memory_is_taken_beyond_the_limit(mode: str) -> None:
    with nothing_left():
        outcomes = dict(zip(TRIES, made([*TRIES.values()], mode, memory_gib=0.5, timeout_s=30), strict=True))
    for name, one in outcomes.items():
        assert refused(one) or (one.failure == "died" and "more than" in one.detail), (name, one)
    for name in ("shared mappings of many processes", "files and memory together", "memory of many processes"):
        assert "took more than 0.5 GiB" in outcomes[name].detail, (name, outcomes[name])


def test_memory_within_the_limit_is_given() -> None:
    taken = (
        SHARED
        + "held = shared(150)\nwith open('/tmp/file', 'wb') as file:\n    for _ in range(50):\n        file.write(MIB)\nwon = True"
    )
    assert made([taken], memory_gib=0.5)[0].correct
