"""Fast paths on CUDA: `kernels` chooses whose kernels these are, `layers` puts them into a model, `chunks` has those of log-probs."""
