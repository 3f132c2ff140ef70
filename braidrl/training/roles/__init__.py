"""Braid's own training backend: `model` holds a rank's part of a role, `base` runs micro-batches through it, `decoder` and `scalar` compute
the predictions, `make` chooses between them, `checkpoint` saves and loads.
"""
