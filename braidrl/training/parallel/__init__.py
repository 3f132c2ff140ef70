"""One role on many devices. `replicated` is the interface that all layouts follow, where each rank has a replica; `sharded` adds
sharding and the axes `tensor`, `sequence` and `pipeline`.
"""
