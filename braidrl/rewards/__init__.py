"""Rewards: verifiers, the processes in which they run, and the columns of their results.

rows ──verify─▶ pool
    ──completions─▶ verifier, in its process: a function of `verifiers`, `instructions`, `math_equivalence`, `programs`,
columns ◀────── scores ◀──────────── `services`, or the user's

Importing this package is cheap: the processes that check answers do not load torch or transformers.
"""
