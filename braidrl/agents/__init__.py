"""Trajectories of several turns, played on an engine.

`player` alternates model and environment, and runs agents. `environments`, `libraries` and `tools` provide
environments, `turns` tokenises observations, `trajectory` collects the tokens, and `endpoint` serves external agents. A
user's environments and agents run in `sandboxed` processes.
"""
