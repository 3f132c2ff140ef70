"""The processes of a run: start and end, devices, process groups, and communication between ranks.

process, child                a process as seen by its parent, and from the inside
local                         processes of this machine with their launcher, and the fork server that most of them come
                              from
ray_cluster, ray_processes    actors of a Ray cluster, and the launcher that starts processes through them
ranks                         N processes that do one task together, supervised: the user sees the first failure
watchdog                      detects frozen processes and kills them
pools, devices, device_kinds  which roles share processes, which CUDA devices these get, and makers' figures
process_groups                process groups, and the time limit of every wait in them
world                         communication between ranks: collectives, and asynchronous messages
event_loop, shared_memory     coroutines for synchronous callers; the folder for files in memory

launcher ──ProcessSpec──▶ child ──join──▶ process group ──▶ World
         ◀──Outcome──────
"""
