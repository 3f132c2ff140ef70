"""Sharded embedded engines: `followers` has those in processes of their own, `spmd` those of ranks that train and decode."""
