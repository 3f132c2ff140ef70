"""Importing this module registers every algorithm that comes with Braid."""
