"""The eager and distributed runtimes: every rank runs the same list of stages; eager is one rank. `launch` starts the
ranks, `shard` is a rank's part of a table and moves its rows between ranks, and `rank_backend` runs a stage on it.
"""
