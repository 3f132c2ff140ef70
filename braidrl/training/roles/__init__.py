"""The built-in training backend: `worker` holds a rank's part of a role, trains and infers it, saves and loads it,
`checkpoint` reads and writes the parts of its checkpoints, `copies` moves its weights to other layouts and roles.
"""
