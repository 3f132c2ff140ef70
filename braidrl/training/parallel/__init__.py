"""Parallel layouts of one role: `layouts` lays ranks out and shards a model, with the axes `tensor`, `sequence` and
`pipeline` in separate files.
"""
