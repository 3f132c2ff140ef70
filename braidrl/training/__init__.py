"""The model of one role: loading, parallel layouts, training and inference over packed sequences.

`backends` is the protocol of a training backend, `backend_contract` the checks that each must pass, and `roles` the backend that comes
with Braid. `objective` is what a train stage minimises, `optimizer` updates, `loading` reads, `roles.checkpoint` writes.
"""
