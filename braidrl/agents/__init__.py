"""Trajectories of several turns, played on an engine.

`player` alternates model and environment. `environments`, `libraries`, `tools` and `agents` are what it plays with, `turns` tokenises
observations, `trajectory` collects the tokens, `endpoint` serves agents written elsewhere. Environments and agents of a user run in
`sandboxed` processes of `host`.
"""
