"""The model of one role: loading, parallel layouts, training and inference over packed sequences.

`backends` is the protocol of a training backend, `backend_contract` the checks that each must pass, `roles` the
built-in backend. `objective` is the loss of a train stage, `optimizer` updates weights, `loading` reads models,
`roles.checkpoint` writes them.
"""
