"""One process of a large run at a time, with the product's own code: what its work and messages do as ranks grow.

    python -m benchmarks.scale                       # ranks 0, 1 and the last of 8 to 4,096: minutes
    python -m benchmarks.scale --sizes 8 64
    python -m benchmarks.scale --runtime streaming   # the controller, an engine and trainer ranks
    python -m benchmarks.scale --runtime hybrid      # the driver

played.py     answers for the other ranks, as if each had as many rows as the rank that is played
streaming.py  answers for the other engines at the queue too
hybrid.py     answers for all workers but the first
__main__.py   plays each in a process of its own, and writes the tables of docs/scaling.md
network.py    efficiency over ranks, from the played figures and a network of latency and bandwidth
"""
