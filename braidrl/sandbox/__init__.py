"""The sandbox of untrusted code: verifiers, environments, tools, agents and models' programs run in processes that
cannot reach the run.

hosts.py  ──starts──▶ host.py, inside the walls of walls.py ──forks──▶ copies.py: the code of one call or trajectory
          ◀───────────── answers.py: plain, bounded data ──────────────────────────────────────────────────────────

fork_gate.py is the filter of system calls.
"""
