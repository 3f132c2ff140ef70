"""Several engines as one: `service` for callers without an event loop, `router` forwards requests, `dispatch` chooses the engine."""
