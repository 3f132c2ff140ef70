"""Who decides what runs next: a `for` loop, a controller on Ray, nobody, or a queue.

run, session ──▶ controller ──▶ a backend: eager, hybrid, distributed or streaming ──▶ executor ──▶ models, engines, rewards

`run` is a training run from its folder to its last checkpoint. `backend` holds the protocols: what a run asks of a controller and of a
backend; `controller` drives an iteration in the flow's order, and `start` is the one place that knows the runtimes by name. All of them
execute stages through `executor`; `generating` is its part around engines, `prepare` what is checked before a model loads, `saving` what
is written to disk.
"""
