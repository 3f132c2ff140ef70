"""The decode step's kernels in C, and their compilation for this processor."""
