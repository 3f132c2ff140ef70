"""The loops of the streaming workers: one for engines, one for models, one for verifiers and registered functions."""
