"""Braid's own training backend: `worker` holds a rank's part of a role, trains and infers it, and copies its weights, `checkpoint` saves
and loads.
"""
