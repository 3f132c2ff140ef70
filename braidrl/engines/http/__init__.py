"""Servers of other projects as engines, over HTTP: `engine` follows the protocol, `servers` is one server, `dialects` their JSON."""
