"""Environments of other libraries, a file for each: `gem` plays games of gem-llm, `mcp` offers the tools of a server, `openenv` speaks to a
server of environments. Each has a function `environment` of the name behind the scheme and the settings, which `environments` finds.
"""
