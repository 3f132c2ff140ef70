"""Environments of other libraries, a file for each: `gem` has games of gem-llm, `mcp` the tools of a server, `openenv` the environments of
a server, `verifiers_library` environments with their own loop. `environments` calls the file's `environment(name, settings)`.
"""
