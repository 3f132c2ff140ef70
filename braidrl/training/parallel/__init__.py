"""Parallel layouts of one role. `replicated` is the interface of all layouts and plain data parallelism; `sharded` adds sharding and
the axes `tensor`, `sequence` and `pipeline`.
"""
