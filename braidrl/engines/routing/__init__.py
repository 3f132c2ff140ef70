"""Several engines as one: `router` forwards requests, `dispatch` chooses the engine."""
