"""Rules of `braid import-config`: `rules.py` has them by name, for the tables of keys of each framework."""
