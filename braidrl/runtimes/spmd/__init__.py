"""The eager and distributed runtimes: every rank runs the same list of stages; eager is one rank. `launch` starts the ranks, `shard` is
a rank's part of a table, `rank_backend` runs a stage on it and moves rows between ranks through `data_buffer`.
"""
