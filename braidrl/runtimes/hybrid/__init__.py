"""The hybrid runtime: a driver that holds handles, and workers on Ray that hold the rows.

In the driver `start` starts everything, `backend` is what a controller calls, `dispatch` makes calls of stages, `group` sends them, and
`handles` are what is carried. A worker is `pool_worker`, which loads and saves, and `worker`, which runs stages.
"""
