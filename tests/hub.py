"""A small model hub on loopback, with the protocol of the real client: information, file tree, files with their hashes.

folder/models/ORG/NAME/..., folder/datasets/ORG/NAME/...   served under one commit each, which `main` and the tag v1
                                                           name
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_tests"
GATED, PRIVATE = "gated", "private"
"""Organisations whose repositories need a token; they answer with that reason, or as if they did not exist."""


class Hub(ThreadingHTTPServer):
    """Serves the repositories in a folder; `asked` records the requests."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = folder
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


class Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        try:
            self.answer([part for part in path.split("/") if part])
        except Refused as refused:
            self.send(refused.status, b"", {"X-Error-Code": refused.code, "X-Error-Message": refused.code})

    def answer(self, parts: list[str]) -> None:
        api = parts[0] == "api"
        parts = parts[api:]
        kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
        repository, what, rest = "/".join(parts[:2]), parts[2] if len(parts) > 2 else "revision", parts[3:]
        folder = self.server.folder / kind / repository
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not folder.is_dir() or (parts[0] == PRIVATE and not known):
            raise Refused(401, "RepoNotFound")
        if parts[0] == GATED and not known and not api:
            raise Refused(403, "GatedRepo")
        if (rest or ["main"])[0] not in ("main", "v1", COMMIT):
            raise Refused(404, "RevisionNotFound")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if what == "revision":
            siblings = [{"rfilename": str(file.relative_to(folder))} for file in files]
            self.send_json({"id": repository, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})
        elif what == "tree":
            self.send_json([described(file, folder) for file in files])
        elif not (folder / "/".join(rest[1:])).is_file():
            raise Refused(404, "EntryNotFound")
        else:
            file = folder / "/".join(rest[1:])
            about = {"ETag": f'"{described(file, folder)["oid"]}"', "X-Repo-Commit": COMMIT}
            self.send(200, file.read_bytes(), about)

    def send_json(self, value: Any) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Write no log."""


def described(file: Path, folder: Path) -> dict[str, Any]:
    """Return a file's entry in the tree: its git hash, and a marker that weights are stored separately."""
    content = file.read_bytes()
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    about = {"type": "file", "path": str(file.relative_to(folder)), "size": len(content), "oid": git}
    if file.suffix in (".safetensors", ".bin"):
        sha = hashlib.sha256(content).hexdigest()
        about |= {"oid": sha, "lfs": {"oid": sha, "size": len(content), "pointerSize": 134}}
    return about


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
