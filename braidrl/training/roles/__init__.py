"""Braid's own training backend: `model` holds a rank's part of a role, `base` runs micro-batches through it, `make` computes predictions of
decoders and scalar models and creates backends, `copies` copies weights, `checkpoint` saves and loads.
"""
