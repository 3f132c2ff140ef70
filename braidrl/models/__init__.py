"""A role's model: loading, layouts over many devices, training and inference over packed sequences, moving weights.

`backend` is the protocol of a training backend, `contract` the checks that each must pass, and `roles` the one that comes with Braid;
`objective` is what a train stage minimises, `optimizer` updates, `loading`, `weight_files` and `checkpoint` read and write.
"""
