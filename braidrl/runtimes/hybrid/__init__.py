"""The hybrid runtime: a driver that holds handles, and workers on Ray that hold the rows.

A controller calls `driver`, which starts everything; `group` starts workers and sends them calls, and `handles` are the
tables. A `hybrid_worker` runs the stages of its roles, and fetches the rows that it lacks from other workers.
"""
