"""Several engines as one: `service` for callers without an event loop, `router` sends each request on, `dispatch` decides where to."""
