"""Braid: reinforcement-learning post-training of language models. Rows are trajectories, columns are what stages write."""

__version__ = "0.1.0"
