"""One rank of a large run at a time, with the product's own code: what its work, bytes and memory do as ranks grow.

    python -m benchmarks.scale                    # ranks 0, 1 and the last of 8, 64, 512 and 1,024: minutes
    python -m benchmarks.scale --sizes 8 64

played.py    answers for the other ranks, as if each had as many rows as the rank that is played
__main__.py  plays each rank in a process of its own, and writes the table of docs/scaling.md
network.py   efficiency over ranks, from the played figures and a network of latency and bandwidth
"""
