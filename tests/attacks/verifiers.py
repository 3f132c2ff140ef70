"""Attacks by untrusted code inside a verifier: each function attacks its surroundings, and returns right at the end."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path


def honest(response: str, answer: str) -> bool:
    return response == answer


def by_name(response: str, answer: str, metadata: dict) -> bool | float | str:
    """Make the attack that the response names; any other response is simply compared."""
    attack = ATTACKS.get(response)
    return response == answer if attack is None else attack(metadata)


def bombs_with_forks(metadata: dict) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.fork()
        except OSError:
            time.sleep(0.01)
    return True


def starts_fifteen(metadata: dict) -> bool:
    for _ in range(15):
        if os.fork() == 0:
            time.sleep(60)
    return True


def starts_sixteen(metadata: dict) -> bool:
    """Start one more, which ends at once."""
    starts_fifteen(metadata)
    if os.fork() == 0:
        os._exit(0)
    return True


def starts_a_hundred_threads(metadata: dict) -> bool:
    for _ in range(100):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return True


def starts_three_hundred_threads(metadata: dict) -> bool:
    for _ in range(3):
        starts_a_hundred_threads(metadata)
    return True


def takes_ten_gigabytes(metadata: dict) -> bool:
    return len(bytearray(10 << 30)) > 0


def takes_it_in_many_processes(metadata: dict) -> bool:
    """Have each of many processes take what one may."""
    for _ in range(12):
        if os.fork() == 0:
            held = bytearray(128 << 20)
            for place in range(0, len(held), 4096):
                held[place] = 1
            time.sleep(60)
    time.sleep(60)
    return True


def prints_a_gigabyte(metadata: dict) -> bool:
    for _ in range(1024):
        os.write(1, b"x" * (1 << 20))
    return True


def returns_a_gigabyte(metadata: dict) -> str:
    return "x" * (1 << 30)


def kills_the_run(metadata: dict) -> bool:
    """Send SIGKILL to the given processes, to the parents, and to all processes that it may signal."""
    for pid in (metadata["run"], *metadata["siblings"], os.getppid(), -1):
        if pid:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    raise RuntimeError("no process was there")


def kills_its_peer(metadata: dict) -> bool:
    """Send SIGKILL to the process at the other end of each socket, of which the kernel gives a descriptor."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as end:
                peer = end.getsockopt(socket.SOL_SOCKET, 77)  # SO_PEERPIDFD
                signal.pidfd_send_signal(peer, signal.SIGKILL)
        except OSError:
            continue
    raise RuntimeError("no process was there")


def traces_the_run(metadata: dict) -> bool:
    if ctypes.CDLL(None, use_errno=True).ptrace(16, metadata["run"], 0, 0) != 0:  # PTRACE_ATTACH
        raise PermissionError("no such process may be traced")
    return True


def reads_the_environment(metadata: dict) -> bool:
    seen = dict(os.environ)
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            seen[str(place)] = place.read_text()
        except OSError:
            continue
    if "hush" not in str(seen):
        raise LookupError("no secret was found")
    return True


def forges_results(metadata: dict) -> bool:
    """Write right answers to every descriptor that it has, for calls that it has nothing to do with."""
    for number in range(3, 256):
        for call in range(8):
            text = b'{"call": %d, "score": 83333.0, "correct": true}' % call
            try:
                if number not in own_sockets():
                    os.write(number, len(text).to_bytes(4, "big") + text)
            except OSError:
                continue
    os._exit(0)


def own_sockets() -> list[int]:
    """The descriptors of its own requests and answers, and of its event loop: what is written there is its own
    row's.
    """
    names = os.listdir("/proc/self/fd")
    return [int(name) for name in names if "socket:" in os.path.realpath(f"/proc/self/fd/{name}")]


def leaves_a_daemon(metadata: dict) -> bool:
    """Start what ends neither with its parent nor with its session."""
    code = "import os, time; os.setsid(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code, metadata["mark"]])
    time.sleep(0.5)
    os._exit(4)


def opens_a_socket(metadata: dict) -> bool:
    with socket.create_connection(("127.0.0.1", metadata["port"]), timeout=2):
        return True


def reads_the_home(metadata: dict) -> bool:
    return bool(Path(metadata["file"]).read_text())


def spins(metadata: dict) -> bool:
    while True:
        pass


ATTACKS = {
    function.__name__: function
    for function in (
        bombs_with_forks,
        starts_fifteen,
        starts_sixteen,
        starts_a_hundred_threads,
        starts_three_hundred_threads,
        takes_ten_gigabytes,
        takes_it_in_many_processes,
        prints_a_gigabyte,
        returns_a_gigabyte,
        kills_the_run,
        kills_its_peer,
        traces_the_run,
        reads_the_environment,
        forges_results,
        leaves_a_daemon,
        opens_a_socket,
        reads_the_home,
        spins,
    )
}
