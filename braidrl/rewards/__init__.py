"""Rewards: verifiers, the processes in which they run, and the columns of their results.

Importing this package is cheap: the processes that check answers load neither torch nor transformers.
"""
