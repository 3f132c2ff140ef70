"""The hybrid runtime: a driver that holds handles, and workers on Ray that hold the rows.

In the driver `start_workers` starts everything, a controller calls `driver`, `group` places and sends stages, and `handles` are
the tables. A `hybrid_worker` runs the stages of its roles, and fetches the rows that it lacks from other workers.
"""
