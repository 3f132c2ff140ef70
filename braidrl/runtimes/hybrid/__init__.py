"""The hybrid runtime: a driver that holds handles, and workers on Ray that hold the rows.

In the driver `start_workers` starts everything, a controller calls `driver`, `group` places and sends stages, and `handles` are
the tables. A worker is a `pool_worker`, which loads and saves, and a `hybrid_worker`, which runs stages and exchanges rows with
the other ranks.
"""
