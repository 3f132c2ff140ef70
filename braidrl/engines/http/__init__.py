"""Servers of other projects as engines, over HTTP: `http_engine` is the engine for one server, `dialects` the servers'
JSON.
"""
