"""The processes of a run: how they are started and ended, which devices they get, and how they meet.

process, child     what a process is to whoever starts it, and the process from its inside
local, fork_server the processes of this machine and their launcher, and the process that most are copies of
ray_cluster, ray_processes    the actors of a Ray cluster, and the launcher whose processes are there
ranks              N processes that do one task together, supervised: the first failure is what the user sees
devices            which process gets which CUDA devices
groups             the process groups in which processes meet, and the time limit of every wait there
world, notices     what ranks say to each other: all at the same point, or in passing

launcher ──ProcessSpec──▶ child ──join──▶ process group ──▶ World
         ◀──Outcome──────
"""
