"""The forward pass over packed sequences: `packed` lays rows out, `attention` defines which tokens attend to which,
`log_probs` computes log-probs and entropy without the full logits.
"""
