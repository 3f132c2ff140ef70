"""Several engines as one: `service` for callers without an event loop, `router` forwards each request, `dispatch` decides where to."""
