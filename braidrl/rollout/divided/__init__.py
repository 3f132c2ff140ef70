"""Tensor-parallel embedded engines: `leader` and `followers` for an engine with processes of its own, `spmd` for ranks that train and
decode together.
"""
