"""The distributed runtime: every rank runs the same list of stages. `launch` starts the ranks, `shard` is a rank's part of a table,
`backend` runs a stage on it and moves rows between ranks."""
