"""Sides of the comparisons: each module has a function `prepare(case)`, which returns one measured turn."""
