"""Tensor-parallel embedded engines: `leader` and `followers` in processes of their own, `spmd` for ranks that train and decode."""
