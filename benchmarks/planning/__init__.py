"""Predictions of `braid plan` against measurements and publications: this machine, streaming's split, published runs,
memory.
"""
