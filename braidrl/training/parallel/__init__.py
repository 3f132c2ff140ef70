"""One role on many devices. `layout` has the axes; `replicated` is the interface that all layouts follow, where each rank has a replica;
`sharded` adds sharding and the axes `tensor`, `sequence` and `pipeline`; `decoding` divides a model for generation. `boxes`, `shards` and
`slices` say which block of a global tensor a rank holds.
"""
