"""Untrusted code: verifiers, environments, tools, agents and programs that a model wrote run in processes that cannot reach the run.

hosts.py  ──spawns──▶ host.py, in the file system of mounts.py ──forks──▶ sandbox.py: supervisor ──forks──▶ the code of one call
          ◀── answers.py: plain, bounded data ────────────────────────────────────────────────────────

policy.py holds the values in which the modes differ, fork_gate.py the filter of system calls.
"""
