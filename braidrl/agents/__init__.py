"""Trajectories of several turns, played on an engine.

`player` alternates model and environment. `environments`, `libraries`, `tools` and `agents` provide environments and agents, `turns`
tokenises observations, `trajectory` collects the tokens, and `endpoint` serves external agents. A user's environments and agents run in
`sandboxed` processes, which execute `answering`.
"""
