"""The decode step's kernels in C, and the decoder that calls them."""
