"""The sandbox of untrusted code: verifiers, environments, tools, agents and models' programs run in processes that cannot reach the run.

hosts.py  ──spawns──▶ host.py, in the file system of mounts.py ──forks──▶ sandbox.py: supervisor ──forks──▶ the code of one call
          ◀── answers.py: plain, bounded data ────────────────────────────────────────────────────────

policy.py holds the differences between the modes, fork_gate.py the filter of system calls, untrusted.py the users' code in a run.
"""
