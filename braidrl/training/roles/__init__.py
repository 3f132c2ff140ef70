"""Braid's own training backend: `model` holds a rank's part of a role, `worker` runs micro-batches through it, predicts for decoders and
scalar models, and copies weights, `checkpoint` saves and loads.
"""
