"""The processes of a run: how they are started and ended, which devices they get, and how they meet.

process, child     one process, seen by whoever starts it and from its inside
local, ray_cluster launchers: where processes go, on this machine or on a Ray cluster
ranks              N processes that do one task together, supervised: the first failure is what the user sees
devices            which process gets which CUDA devices
groups             the process groups in which processes meet, and the time limit of every wait there
world, notices     what ranks say to each other: all at the same point, or in passing

launcher ──ProcessSpec──▶ child ──join──▶ process group ──▶ World
         ◀──Outcome──────
"""
