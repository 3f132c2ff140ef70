"""The model of one role: loading, parallel layouts, training and inference over packed sequences, and moving weights.

`backend` is the protocol of a training backend, `contract` the checks that each must pass, and `roles` the one that comes with Braid;
`objective` is what a train stage minimises, `optimizer` updates, `loading`, `weight_files` and `checkpoint` read and write.
"""
