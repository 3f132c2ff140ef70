"""The forward pass over packed sequences: `packed` and `shared_prompts` lay rows out, `attention` says which token attends to which,
`log_probs` computes log-probabilities and entropy without the whole matrix of logits."""
