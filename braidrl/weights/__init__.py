"""Weights on their way: which rank holds which slice, how slices move to another layout, and how a version reaches an engine.

`weight_index` says who holds what, `reshard_plan` which moves lead to another layout, `update_policy` when an engine loads a version.
"""
