"""Sharded embedded engines: `followers` in processes of their own, `spmd` on the ranks that train."""
