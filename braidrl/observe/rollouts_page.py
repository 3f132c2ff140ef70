"""A local web page of a run's recorded episodes: one HTML file and a server that answers it.

browser ──GET /api/rows?min_reward=0.5──▶ RowIndex.choose ──▶ numbers of rows     GET /api/row?row=17 ──▶ one episode

The server listens on 127.0.0.1 and answers requests that name it so: a page of another site, whose name resolves to
this address, cannot read recordings. The HTML file shows texts of models as text, and loads nothing from elsewhere.
"""

import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tokenizers import Tokenizer

from braidrl.errors import UserError
from braidrl.observe.episodes import Filter, RowIndex, episode, thumbnails, tokenizer_of
from braidrl.observe.rollouts import recorded_evaluations, recorded_steps

HOST = "127.0.0.1"
MOST_ROWS = 500
"""The largest number of rows of one answer."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
KINDS = {
    "step": int,
    "min_reward": float,
    "max_reward": float,
    "min_tokens": int,
    "max_tokens": int,
    "ended": str,
    "sort": str,
}
"""Parameters of a filter."""


class Recordings:
    """The recordings of a run, each set indexed at its first use."""

    def __init__(self, run: Path) -> None:
        self.run, self.lock = run, Lock()
        self.sets = recorded_evaluations(run)
        self.indices: dict[str | None, RowIndex] = {}
        self.tokenizer: Tokenizer | None = None
        self.has_read_tokenizer = False
        self.thumbnail = thumbnails(run / "config.yaml")

    def index(self, name: str | None) -> RowIndex:
        with self.lock:
            if name not in self.indices:
                self.indices[name] = RowIndex(self.run, name)
            return self.indices[name]

    def answer(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the answer to a request as JSON. Raises UserError for a wrong parameter, KeyError for another path."""
        index = self.index(query.get("set") or self.first_set())
        if path == "/api/run":
            names = sorted(index.numbers)
            return {"run": str(self.run), "sets": self.sets, "rows": len(index), "columns": names}
        if path == "/api/rows":
            rows = index.choose(filter_of(query))
            start, count = number(query, "start", 0), min(number(query, "count", 100), MOST_ROWS)
            shown = [index.summary(row) for row in rows[start : start + count]]
            return {"total": len(rows), "rows": shown}
        if path == "/api/row":
            row = number(query, "row", 0)
            if not 0 <= row < len(index):
                raise UserError(f"row: there are rows 0 to {len(index) - 1}, got {row}")
            with self.lock:
                if not self.has_read_tokenizer:
                    self.tokenizer, self.has_read_tokenizer = tokenizer_of(self.run), True
            opened = episode(*index.record(row), self.tokenizer)
            image_names = {
                token["image"] for segment in opened["segments"] for token in segment["tokens"] if "image" in token
            }
            return {**index.summary(row), **opened, "images": {name: self.thumbnail(name) for name in image_names}}
        raise KeyError(path)

    def first_set(self) -> str | None:
        """Return None, which means training, or the first evaluation set of a folder that only has these."""
        return None if recorded_steps(self.run) or not self.sets else self.sets[0]


def number(query: Mapping[str, str], name: str, default: int) -> int:
    """Return a parameter that is a whole number from 0. Raises UserError for other text."""
    text = query.get(name) or str(default)
    if not text.isdecimal():
        raise UserError(f"{name} must be a whole number from 0, got {text!r}")
    return int(text)


def filter_of(query: Mapping[str, str]) -> Filter:
    """Return the filter of a request's parameters. Raises UserError for a value of another type."""
    values: dict[str, Any] = {}
    for name, kind in KINDS.items():
        if query.get(name):
            try:
                values[name] = kind(query[name])
            except ValueError:
                raise UserError(f"{name} must be a number, got {query[name]!r}") from None
    return Filter(**values)


class PageServer(ThreadingHTTPServer):
    """The server of a run's page."""

    daemon_threads = True

    def __init__(self, run: Path, port: int = 0) -> None:
        """Index the run's rows and listen; port 0 takes a free one. Raises UserError if empty, or the port is used."""
        self.recordings = Recordings(run)
        self.recordings.index(self.recordings.first_set())
        self.page = files("braidrl.observe").joinpath("assets/rollouts.html").read_bytes()
        try:
            super().__init__((HOST, port), PageHandler)
        except OSError as error:
            raise UserError(f"port {port}: {error.strerror}; give another --port, or 0 for a free one") from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"


class PageHandler(BaseHTTPRequestHandler):
    """Answers a request of the page."""

    server: PageServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (HOST, "localhost"):
            self.send(403, "text/plain", f"this server is {self.server.address}".encode())
        elif url.path == "/":
            self.send(200, "text/html; charset=utf-8", self.server.page)
        else:
            try:
                status, answer = 200, self.server.recordings.answer(url.path, query)
            except KeyError:
                status, answer = 404, {"error": f"there is nothing at {url.path}"}
            except UserError as error:
                status, answer = 400, {"error": str(error)}
            self.send(status, "application/json", json.dumps(answer, allow_nan=False).encode())

    def send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "Content-Security-Policy": POLICY}
        for name, value in {**headers, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: the terminal shows the page's address."""
