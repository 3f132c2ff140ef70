"""Trajectories of several turns: `player` lets model and environment take turns, `environments`, `gem`, `tools` and `agents` are what it
plays with, `turns` tokenises observations, `trajectory` collects the tokens, `endpoint` serves agents written elsewhere.
Environments and agents of a user's own are played by `sandboxed` in processes of `host`.
"""
