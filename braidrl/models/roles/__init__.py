"""Braid's own training backend: `model` is what a rank holds of a role, `base` runs micro-batches through it, `decoder` and `scalar` say
what is predicted, `make` chooses between them, `likelihood` is the second loss of PPO-ptx."""
