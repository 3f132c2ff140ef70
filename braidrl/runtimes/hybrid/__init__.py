"""The hybrid runtime: a driver that holds handles, and workers on Ray that hold the rows.

In the driver `start_workers` starts everything, `driver` is what a controller calls, `stage_dispatch` makes calls of stages, `group` sends
them, and `handles` are the tables. A worker is `pool_worker`, which loads and saves, and `hybrid_worker`, which runs stages; ranks of a
pool give each other rows by `pool_exchange`.
"""
