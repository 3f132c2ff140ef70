"""The four execution modes: eager (one process), hybrid (Ray controller), distributed (SPMD), streaming (asynchronous).

run, session ─▶ controller ─▶ a backend: eager, hybrid, distributed or streaming ─▶ executor ─▶ models, engines, rewards

`run` is a training run from its folder to its last checkpoint. `interfaces` holds the protocols of controllers and
backends; `controller` drives an iteration in the flow's order, and only `start` knows the runtimes by name. All of them
execute stages through `executor`. `generating` is its part around engines, `prepare` the checks before a model loads,
`saving` the files on disk.
"""
