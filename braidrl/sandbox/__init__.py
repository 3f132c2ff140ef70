"""Untrusted code: verifiers, environments, tools, agents and programs that a model wrote run in processes that cannot reach the run."""
