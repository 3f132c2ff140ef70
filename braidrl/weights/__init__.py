"""Weights: which rank holds which slice, how slices move to another layout, and how a version reaches an engine.

parts ─▶ reshard_plan ─▶ publisher: in_place │ collective │ file ─▶ engine          versions says when it loads

A role's weights, its adapters alone, and EMA or target-network copies use the same path.
"""
