"""Ray's workers as copies of the tests' fork server: a fresh interpreter would import torch and transformers for five
seconds.

raylet ──▶ this file, in place of setup_worker.py ──arguments, environment, outputs──▶ server ──fork─▶ default_worker.py
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

SERVER = "BRAID_TESTS_RAY_WORKERS"
"""Environment variable with the path of the server's socket."""
CONTEXT = "--serialized-runtime-env-context"


def serve(place: str, tests: int) -> None:
    """Start a worker for each connection. A copy of the fork server runs this while the tests' process `tests` does."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Ended workers leave no zombies.
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen(64)
        end = os.pidfd_open(tests)
        while end not in select.select([listening, end], [], [])[0]:
            connection, _ = listening.accept()
            size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
            asked, outputs, _, _ = socket.recv_fds(connection, 1, 3)
            asked += connection.recv(size - 1, socket.MSG_WAITALL)
            if os.fork() == 0:
                listening.close()
                os.close(end)
                become(connection, outputs, **json.loads(asked))
            connection.close()
            for each in outputs:
                os.close(each)


def become(connection: socket.socket, outputs: list[int], arguments: list[str], environment: dict[str, str]) -> None:
    """Run a script of Ray in this process.

    The connection ends with it, and with the connection the process that the raylet started.
    """
    import runpy

    from tests.commands import run_as_interpreter

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for standard, descriptor in enumerate(outputs):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    connection.set_inheritable(False)
    # Ray reads the environment when it is imported, so that the server must not have imported it.
    run_as_interpreter(arguments, os.getcwd(), environment, lambda: runpy.run_path(arguments[0], run_name="__main__"))


def main() -> None:
    """Have the server start the worker, and stay until the worker has ended."""
    told = dict(each.split("=", 1) for each in sys.argv[1:] if each.startswith(("--language=", CONTEXT)))
    arguments = [each for each in sys.argv[1:] if each.partition("=")[0] not in told]
    environment = json.loads(told.get(CONTEXT, "{}")).get("env_vars", {})
    asked = json.dumps({"arguments": arguments, "environment": {**os.environ, **environment}}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SERVER])
        server.sendall(len(asked).to_bytes(8, "big"))
        socket.send_fds(server, [asked[:1]], [0, 1, 2])
        server.sendall(asked[1:])
        while server.recv(1):
            pass


if __name__ == "__main__":
    main()
