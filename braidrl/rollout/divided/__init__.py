"""Tensor-parallel embedded engines: `leader` and `followers` for an engine with processes of its own (`processes` starts them), `spmd` for
ranks that train and decode together.
"""
