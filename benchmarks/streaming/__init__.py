"""The streaming runtime at work that takes a given time: `sleeping` is that work as plug-ins, `ways` times the ways to take weights."""
