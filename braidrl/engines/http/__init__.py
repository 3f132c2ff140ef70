"""Servers of other projects as engines, over HTTP: `http_engine` is the engine, `servers` one server, `dialects` the servers' JSON."""
